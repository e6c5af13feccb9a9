"""What the orchestrator's tools run on: the sandbox, the index, experts."""
