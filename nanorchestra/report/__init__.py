"""The records of a run and what shows them: run directory, tables, plots, pages, terminal.

Only the files at the root of nanorchestra are imported here, except by terminal.
"""
