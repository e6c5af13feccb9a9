"""Paged inference: the public `Engine`, and the request, scheduler and page cache behind it.

`runner` computes a planned step on a CPU, `gpu` on a GPU; `steps` launches the next one.
`guide` holds tool calls to valid JSON, `stream` turns sampled ids into text as they come.
"""
