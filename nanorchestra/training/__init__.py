"""The GRPO trainer: packing, objectives, ranks, checkpoints."""
