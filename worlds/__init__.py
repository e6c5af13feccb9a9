"""The tasks that a policy is trained and judged on: docs/worlds.md.

desk.py and toolscale/ are worlds, mixture.py opens them for a run, metrics.py scores
and summarises attempts, and routers.py has the strategies to beat.
"""
