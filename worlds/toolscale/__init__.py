"""ToolScale: databases, tools that are data, tasks that are proved, and scores of attempts.

words.py, records.py and blueprint.py build a domain; planner.py, act.py, wishes.py and tasks.py
write its tasks; verify.py and score.py judge them; dataset.py and environment.py play them. No
torch.
"""
