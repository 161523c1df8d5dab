"""What the commands about Hugging Face's models have in common: reading them, and our methods inside them."""
