"""Commands around training."""
