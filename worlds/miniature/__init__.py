"""The small world that a CPU learns."""
