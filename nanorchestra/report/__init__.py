"""The records of a run and what shows them: run directory, plots, page, live report, terminal.

Only the files at the root of nanorchestra are imported here, except by terminal.
"""
