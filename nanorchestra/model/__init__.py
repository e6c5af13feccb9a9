"""The Qwen3 decoder, its checkpoints, tokenizer and chat format."""
