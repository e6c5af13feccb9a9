"""The tasks a policy is trained and judged on, and the fixed routers it must beat."""
