"""What the engine asks of a runner, which computes batches: CpuRunner, or ModelRunner on a GPU."""

from typing import Any, Protocol

from torch import Tensor

from nanorchestra.engine.sampler import Result
from nanorchestra.engine.scheduler import Batch
from nanorchestra.engine.sequence import Request


class Runner(Protocol):
    """Owns the KV pages, `kv_cache`, and computes and draws a batch in three calls.

    overlaps: whether the engine may launch a step before it reads the one before. mixed_prefill:
    tokens of prefill at most in steps that also decode, if they are bounded.
    """

    kv_cache: Tensor
    overlaps: bool
    mixed_prefill: int | None

    def launch(self, batch: Batch, after: Any = None) -> Any:
        """Starts a step; returns what the other calls need.

        after: the launched step before, if its draws are not read yet. They are the newest ids of
        the batch's requests.
        """

    def draw(self, launched: Any, requests: list[Request]) -> None:
        """Finishes the draws of a step for these requests.

        Call it after the tokens of the step before are accepted, and before the next launch.
        """

    def read(self, launched: Any, requests: list[Request]) -> list[Result]:
        """Returns the draws of these requests, once they are there."""

    def wait(self) -> None:
        """Returns when everything that was launched has been computed."""
