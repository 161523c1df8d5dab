"""Connects this repository to Hugging Face's transformers: exports our models, and converts its Llama models."""
