"""The run directory, its plots and its page."""
