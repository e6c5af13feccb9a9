"""The multi-turn loop, what the policy reads, the environment of an attempt, and its limits."""
