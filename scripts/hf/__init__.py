"""Models of Hugging Face's transformers: ours exported to it, and its own with our attention methods."""
