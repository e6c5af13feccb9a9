"""Paged inference: the public `Engine`, and what it is made of.

Reading order: `sequence`, `block_manager`, `scheduler`, then a runner (`cpu_runner`; on a GPU
`model_runner`), then `engine`. `sampler` draws on a CPU, `score` gives log-probabilities, `guide`
holds tool calls to valid JSON, `session` keeps a conversation, `stream` turns ids into text.
"""
