"""The tasks that a policy is trained and judged on: docs/worlds.md.

miniature/ and toolscale/ are worlds, mixture.py opens them for a run, metrics.py scores
and summarises attempts, and routers.py has the fixed strategies to beat.
"""
