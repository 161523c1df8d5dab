"""Continual pretraining of other people's models with our attention methods, as in the paper's table of Llama 2 7B."""
