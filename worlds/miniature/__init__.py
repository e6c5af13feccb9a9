"""The miniature: a small world in which a CPU trains an orchestrator in minutes.

tables.toml and phrases.toml hold its numbers and words, world.py draws tasks and plays them,
offers.py describes the tools on offer, teacher.py demonstrates them for the warm start, and
probe.py measures whether a policy reacts to prices.
"""
