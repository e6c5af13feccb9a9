"""What equal runs have in common in metrics.jsonl."""

# What differs between two equal runs in a row of metrics.
TIMINGS = {"seconds", "tokens_per_s", "phase_seconds", "mfu", "memory_mb"}


def steps_of(run):
    """Returns the rows of metrics.jsonl without what differs between equal runs."""
    rows = run.folder.rows("metrics")
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in rows]
