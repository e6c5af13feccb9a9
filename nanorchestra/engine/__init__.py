"""Paged inference: the public `Engine`, and what it is made of.

Reading order: `sequence`, `block_manager`, `scheduler`, `engine`, `runner`, `sampler`, then
`cpu_runner`, or for a GPU `gpu_runner` and `step_inputs`. `score` gives log-probabilities,
`guide` holds tool calls to valid JSON, `session` keeps a conversation's KV, and `stream` turns ids
into text.
"""
