"""ToolScale: domains that are Python files, tasks that are proved, and scores of attempts.

toolkit.py and wishes.py are what a domain's file is made of, domain.py opens one; plan.py writes
its tasks; verify.py and score.py judge them; dataset.py and environment.py play them. No torch.
"""
