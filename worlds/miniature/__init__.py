"""The miniature: a small world in which a CPU trains an orchestrator in minutes.

tables.toml and phrases.toml hold its numbers and words. draw.py and world.py make tasks, offers.py
describes the tools on offer, teacher.py demonstrates them, ask.py reads typed questions, probe.py
measures whether a policy reacts to prices, and induction.py prepares the initial weights.
"""
