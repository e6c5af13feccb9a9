"""The ranks of a run: how they join, what they exchange, how they end, how they shard a model.

`Ranks.start` reads the environment that torchrun sets. Without torchrun there is one rank, and
every exchange is a no-op. Exchanges are collectives: all ranks call them in the same order. When a
rank fails, dies or hangs, the others end within SILENCE seconds, so that torchrun can start all of
them again.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from nanorchestra.errors import UserError, require
from nanorchestra.model.qwen3 import Qwen3

TIMEOUT = timedelta(seconds=1800)  # of a collective: rollouts of ranks differ in length
BEAT = 2.0  # seconds between two exchanges of the watch
SILENCE = 30.0  # seconds that the watch waits for a rank
RUNNING, DONE = "", "done"  # what a rank says in them, unless why it fails
T, R = TypeVar("T"), TypeVar("R")


class SharedError(UserError):
    """A UserError that every rank has received."""


class Ranks:
    """This process among the ranks of a run. Rank 0 writes the records.

    `mesh` is None while parameters are plain tensors: one process in float32 on a CPU. Else it is a
    device mesh whose last dimension "shard" divides the weights. With a first dimension "replicate"
    each group of ranks that shards has a whole copy (HSDP). `group` is of gloo, also beside NCCL.
    """

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | str = "cpu"):
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.mesh: DeviceMesh | None = None
        self.group: dist.ProcessGroup | None = None
        self._word, self._watch = RUNNING, threading.Thread()

    @classmethod
    def start(
        cls,
        device: str = "cpu",
        *,
        shard: str = "all",
        sharded: bool = False,
    ) -> Ranks:
        """Joins the ranks that torchrun has started; without torchrun returns a single rank.

        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank). shard: "all" divides the weights by
        all ranks, "node" by those of a node, with a replica per node. sharded: makes a mesh for a
        single rank too, for its mixed precision. UserError: fewer GPUs than ranks; unequal nodes.
        """
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
        rank, world, local = (int(os.environ.get(name, value)) for name, value in names.items())
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        place = device
        if device == "cuda":
            count = torch.cuda.device_count()
            require(
                local < count,
                f"torchrun: rank {rank} has no GPU; start at most {count} per node",
            )
            torch.cuda.set_device(local)
            place = f"cuda:{local}"
        ranks = cls(rank, world, place)
        if world == 1 and not sharded:
            return ranks
        require(
            world % per_node == 0,
            f"torchrun: {world} ranks on nodes of {per_node}; start equally many on every node",
        )
        ranks._join("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        shape, dimensions = (world,), ("shard",)
        if shard == "node" and world > per_node:
            shape, dimensions = (world // per_node, per_node), ("replicate", "shard")
        ranks.mesh = dist.init_device_mesh(device, shape, mesh_dim_names=dimensions)
        return ranks

    def _join(self, backend):
        if self.world == 1:
            store = dist.HashStore()
        else:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
            # torchrun's store outlives a restart, with the keys of the attempt before
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt/{attempt}", store)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world, timeout=TIMEOUT
        )
        if self.world == 1:
            return
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        watch = dist.new_group(backend="gloo", timeout=timedelta(seconds=SILENCE))
        self._watch = threading.Thread(target=self._listen, args=[watch], daemon=True)
        self._watch.start()

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def beside(self) -> Ranks:
        """Returns the same ranks for one more thread, whose exchanges do not cross this one's."""
        other = copy.copy(self)
        if self.world > 1:
            other.group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return other

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value (pickled); SharedError if one of them is a UserError."""
        if self.world == 1:
            return [value]
        values = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.group)
        except RuntimeError:
            self._watch.join(SILENCE)  # it knows why, says so, and ends this process
            raise
        for value in values:
            if isinstance(value, UserError):
                raise SharedError(*value.args)
        return values

    def map(
        self, function: Callable[[Sequence[T]], list[R]], items: Sequence[T], together: int = 1
    ) -> list[R]:
        """Returns function(items), computed in shares of whole runs of `together` items."""
        share = -(-len(items) // (self.world * together)) * together
        mine = items[share * self.rank : share * (self.rank + 1)]
        return [result for part in self.gather(function(mine)) for result in part]

    def together(self, function: Callable[[], R]) -> R:
        """Returns function(); a UserError on one rank is raised on all of them.

        The other ranks receive it where they next gather: inside `function`, or after it.
        """
        try:
            result = function()
        except SharedError:
            raise
        except UserError as error:
            self.gather(error)
            raise  # one rank: there was no exchange
        self.gather(None)
        return result

    def fail(self, reason: str) -> None:
        """Tells the other ranks that this one ends, and why; they end too."""
        self._say(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leaves the ranks at the end of a run that went well, when all have come to it."""
        self._say(DONE)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _say(self, word):
        self._word = word
        if self._watch.is_alive():
            self._watch.join()

    def _listen(self, group):
        """Exchanges words until all ranks are done; ends this process if the run is lost.

        The time-out of other collectives, as long as the longest rollout, would notice too late.
        """
        words = [RUNNING] * self.world
        while not all(word == DONE for word in words):
            time.sleep(BEAT)
            lost = ""
            try:
                dist.all_gather_object(words, self._word, group=group)
            except RuntimeError as error:
                lost = f"a rank has died or hangs ({str(error).splitlines()[0]})"
            if self._word not in (RUNNING, DONE):
                return  # the main thread ends this rank
            lost = next((word for word in words if word not in (RUNNING, DONE)), lost)
            if lost:
                # not sys.stderr, which torch swaps while it prints the main thread's traceback
                print(f"rank {self.rank} ends: {lost}", file=sys.__stderr__, flush=True)
                time.sleep(BEAT)  # the exchange of slower ranks needs this one to its end
                os._exit(1)  # the main thread may wait in a collective that never ends


def shard_model(
    model: Qwen3, ranks: Ranks, dtype: torch.dtype = torch.float32, *, cpu_offload: bool = False
) -> Qwen3:
    """Shards a model over the mesh in place, by FSDP2 (Zhao et al. 2023, arXiv 2304.11277).

    Layers are gathered one at a time. The root, embeddings and output matrix, stays gathered from
    its forward to the end of the backward, since the log-probabilities use it outside of a forward.
    Forward and backward compute in `dtype`. Gradients are reduced in the dtype of the trained
    weights, float32 as a rule; frozen weights may have another (lora.py). cpu_offload: weights,
    gradients and moments live in host memory, and the optimizer steps there. Without a mesh the
    model stays as it is.
    """
    if ranks.mesh is None:
        return model
    master = next((p.dtype for p in model.parameters() if p.requires_grad), model.norm.dtype)
    on_gpu = ranks.device.type == "cuda"
    options = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=master,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if cpu_offload else OffloadPolicy(),
    }
    layers = list(model.layers)
    for layer in layers:
        # the backward of the last layer comes at once
        fully_shard(layer, reshard_after_forward=layer is not layers[-1], **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return model
