"""The model: GPT (gpt.py), how an attention method is run (attention.py), what the methods are (methods/)."""
