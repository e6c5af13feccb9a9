"""The Qwen3 decoder: its arithmetic, weights and adapters, its tokenizer and its chat format.

chat, parser and tokenizer do not import torch.
"""
