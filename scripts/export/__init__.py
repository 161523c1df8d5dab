"""Writes a trained model as a folder that other people's programs load: see __main__.py."""
