"""What the engine asks of a device: launch a step, draw its tokens, read them.

`CpuRunner`, or on a GPU `GpuRunner`, owns the KV pages and computes the logits of a batch. How
tokens are drawn from them and come to the host is the same for both, and stands here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nanorchestra.engine.sampler import Draws, Result, draw_tokens
from nanorchestra.engine.scheduler import Batch
from nanorchestra.engine.sequence import Request
from nanorchestra.model.qwen3 import ModelConfig


@dataclass
class Launched:
    """A step that is computed, or that a GPU is about to compute."""

    batch: Batch
    requests: list[Request]  # those that are sampled, in the order of the rows of logits
    logits: Tensor  # [len(requests), vocab]; a GPU's next launch overwrites them
    draws: Draws | None = None  # once `Runner.draw` has been called
    draws_on_host: Draws | None = None  # their copy, there once `copy_done` has come
    copy_done: torch.cuda.Event | None = None
    errors: dict[Request, Exception] = field(default_factory=dict)  # of those without a draw


class Runner:
    """Computes steps over KV pages: kv_cache [2, layers, num_pages, Hkv, page_size, D], keys first.

    A step k is `launch(k)`, `draw(k)`, `read(k)`. Tokens of the step before may be unread at
    `launch(k)`, if the runner `overlaps`. They must be accepted before `draw(k)`: masks of guides
    follow from them, and the noise from the length of the sequence. `launch(k + 1)` comes after
    `draw(k)`.
    """

    overlaps = False
    kv_cache: Tensor

    def __init__(self, num_drawable: int, page_size: int):
        self.num_drawable = num_drawable  # ids that may be drawn
        self.page_size = page_size

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.kv_cache.shape[2]

    def launch(self, batch: Batch, previous: Launched | None = None) -> Launched:
        """Starts a step; a GPU computes it later.

        `previous`: the step before, if its tokens are unread. Decodes of `batch` that are sampled
        in it go on with these tokens.
        """
        raise NotImplementedError

    def draw(self, launched: Launched) -> None:
        """Draws the tokens of a step, and starts their copy to the host.

        A request whose guide raises has that error in place of a token. Rows of requests that have
        ended since the launch are drawn too, and ignored.
        """
        requests = launched.requests
        if not requests:  # chunks in the middle of prompts
            return
        masks: list[np.ndarray | None] = [None] * len(requests)
        for row, request in enumerate(requests):
            if request.guide is not None and not request.finished:
                try:
                    masks[row] = request.allowed_ids(self.num_drawable)
                except Exception as error:
                    launched.errors[request] = error
        launched.draws = launched.draws_on_host = draw_tokens(
            launched.logits,
            self.num_drawable,
            [request.params for request in requests],
            [len(request.ids) for request in requests],
            masks,
        )
        if launched.logits.is_cuda:
            launched.draws_on_host = launched.draws.to_host()
            launched.copy_done = torch.cuda.Event()
            launched.copy_done.record()

    def read(self, launched: Launched) -> dict[Request, Result]:
        """Waits for the draws of a step; a request that cannot be drawn has its error."""
        if not launched.requests:
            return {}
        if launched.copy_done is not None:
            launched.copy_done.synchronize()
        draws = launched.draws_on_host.listed([request.params for request in launched.requests])
        results: dict[Request, Result] = dict(zip(launched.requests, draws, strict=True))
        results.update(launched.errors)
        return results

    def wait(self) -> None:
        """Waits for everything that was launched."""

    def clear(self) -> None:
        """Zeroes the KV pages, once everything that was launched has been computed.

        native.c multiplies values behind a sequence's last key by 0, and 0 * NaN is NaN.
        """
        self.wait()
        self.kv_cache.zero_()


def kv_shape(config: ModelConfig, num_pages: int, page_size: int) -> tuple[int, ...]:
    """Returns the shape of a KV cache of so many pages."""
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    return 2, layers, num_pages, kv_heads, page_size, config.head_dim


def page_bytes(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a page: keys and values of page_size positions in all layers."""
    return math.prod(kv_shape(config, 1, page_size)) * dtype.itemsize
