"""Doors: every word for a model becomes a directory in Hugging Face layout, which the core reads.

The core does not import this package.
"""
