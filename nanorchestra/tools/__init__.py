"""What the tools of the orchestrator run on.

sandbox: confined Python. index: passages found by their words. experts: models behind endpoints.
"""
