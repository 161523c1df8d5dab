"""What is measured of a model: validation losses, copy gain and far gain, and FLOPs."""
