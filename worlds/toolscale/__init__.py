"""toolscale: makes worlds (databases, tools, policies) and tasks in them, proves each task, scores attempts. No torch anywhere."""
