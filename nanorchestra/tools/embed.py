"""Computes the vectors of texts with Qwen3-Embedding (arXiv 2506.05176), by our own decoder.

A text's vector is the normalised hidden state of its last token, <|endoftext|>. A query stands
behind an instruction, a passage alone. Any Qwen3 backbone in Hugging Face layout loads, by its
directory or hub id.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from nanorchestra.errors import require
from nanorchestra.formats.load import load_model
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.tools.devices import current, own_device

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MAX_TOKENS = 8192  # of a text; what is beyond them is cut


class Embedder:
    """A model on a GPU in bf16, or on the CPU in fp32; `dimension` is its hidden size.

    The GPU is that of the thread that makes it. Any thread may use it. UserError for anything wrong
    with the checkpoint.
    """

    def __init__(self, checkpoint: str | Path):
        self.device = own_device()
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        # A backbone has no output matrix, whatever its configuration says about tying one.
        self._model, self._tokenizer = load_model(
            checkpoint,
            str(self.device),
            dtype,
            build=lambda config: Qwen3(replace(config, tie_word_embeddings=True)),
        )
        require(self._tokenizer, f"{checkpoint}: no tokenizer.json")
        is_qwen3 = self._tokenizer.markers
        require(is_qwen3, f"{checkpoint}: its tokenizer is not that of Qwen3-Embedding")
        self.dimension = self._model.config.hidden_size

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of queries, float32 [texts, dimension] of length 1."""
        return self.passages([f"Instruct: {INSTRUCTION}\nQuery:{text}" for text in texts])

    @torch.inference_mode()
    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Returns the vectors of passages, float32 [texts, dimension] of length 1.

        All are computed at once, packed without padding.
        """
        end = self._tokenizer.token_id("<|endoftext|>")
        rows = [[*self._tokenizer.encode(text)[: MAX_TOKENS - 1], end] for text in texts]
        lengths = [len(row) for row in rows]
        ends = list(accumulate(lengths))
        segments = [Segment(end - n, n) for end, n in zip(ends, lengths, strict=True)]
        with current(self.device):
            tokens = torch.tensor(sum(rows, []), device=self.device)  # [T]
            positions = torch.cat([torch.arange(n, device=self.device) for n in lengths])
            hidden = self._model(tokens, positions, PackedAttention(segments))  # [T, hidden]
            last = hidden[torch.tensor(ends, device=self.device) - 1]  # [texts, hidden]
            return F.normalize(last.float(), dim=-1).cpu().numpy()
