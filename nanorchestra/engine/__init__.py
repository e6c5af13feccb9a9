"""Paged inference: requests, scheduling, the KV cache, sampling."""
