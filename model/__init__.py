"""The model: GPT (gpt.py), its loss, decoding, attention methods (methods/) and their backends (attention/)."""
