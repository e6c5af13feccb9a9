"""The miniature: a small world in which a CPU trains an orchestrator in minutes.

tables.toml holds its numbers, language.toml the grammar of what users say, names.toml the parts of
aliases. language.py and names.py draw from them, draw.py and world.py make tasks, offers.py
describes the tools on offer, teacher.py demonstrates them, ask.py reads typed questions, draft.py
and induction.py prepare the initial weights.
"""
