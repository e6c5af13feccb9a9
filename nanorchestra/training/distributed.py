"""The ranks of a run: how they join, what they exchange, how they end, how they shard a model.

`Ranks.start` reads the environment that torchrun sets. Without torchrun there is one rank, and
every exchange is a no-op. Exchanges are collectives: all ranks call them in the same order.

A rank that fails, dies or hangs would leave the others in a collective for hours. So each rank has
a watch: a thread that exchanges a word with the others every BEAT seconds, and ends its process
when one of them says that it fails, or says nothing for SILENCE seconds. torchrun can then start
all of them again.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from nanorchestra.agent.attempts import RETRIES
from nanorchestra.config import Config
from nanorchestra.errors import INTERRUPTED, UserError, require
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.training.overlap import running

JOIN_S = 120.0  # from the first rank to the last that joins
COLLECTIVE_S = 1800.0  # of a collective whose ranks come to it at about the same time
TURN_S = 1800.0  # of a turn: sampling, and its slowest call with the wait for a free connection
BEAT = 2.0  # seconds between two exchanges of the watch
SILENCE = 30.0  # seconds that the watch waits for a rank
RUNNING, DONE = "", "done"  # what a rank says to the watch, unless why it fails
T = TypeVar("T")


class Ranks:
    """This process among the ranks of a run. Rank 0, the `first`, writes the records and prints.

    `mesh` is None while parameters are plain tensors: one process in float32 on a CPU. Else it is a
    device mesh whose last dimension "shard" divides the weights. With a first dimension "replicate"
    each group of ranks that shards has a whole copy (HSDP).
    """

    def __init__(self, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.mesh: DeviceMesh | None = None
        self._group: dist.ProcessGroup | None = None  # of gloo, also beside NCCL
        self._watch: _Watch | None = None

    @classmethod
    def start(cls, device: str = "cpu", *, shard: str = "all", sharded: bool = False) -> Ranks:
        """Joins the ranks that torchrun has started; without torchrun returns a single rank.

        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank). shard: "all" divides the weights by
        all ranks, "node" by those of a node, with a replica per node. sharded: makes a mesh for a
        single rank too, for its mixed precision. UserError: fewer GPUs than ranks; unequal nodes;
        a rank that does not join within JOIN_S seconds.
        """
        rank = int(os.environ.get("RANK", 0))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        place = device
        if device == "cuda":
            gpus = torch.cuda.device_count()
            require(
                local_rank < gpus,
                f"torchrun: rank {rank} has no GPU; start at most {gpus} per node",
            )
            torch.cuda.set_device(local_rank)
            place = f"cuda:{local_rank}"
        ranks = cls(rank, world_size, place)
        if world_size == 1 and not sharded:
            return ranks
        require(
            world_size % per_node == 0,
            f"torchrun: {world_size} ranks on nodes of {per_node}; start equally many on every "
            "node",
        )
        ranks._join("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        shape, dimensions = (world_size,), ("shard",)
        if shard == "node" and world_size > per_node:
            shape, dimensions = (world_size // per_node, per_node), ("replicate", "shard")
        ranks.mesh = dist.init_device_mesh(device, shape, mesh_dim_names=dimensions)
        return ranks

    def _join(self, backend: str) -> None:
        """Makes the process groups; the watch begins as soon as it can."""
        store = dist.HashStore() if self.world_size == 1 else _meet(self.rank, self.world_size)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        if self.world_size > 1:
            self._watch = _Watch(self.rank, self.world_size)
            self._group = _gloo_group(COLLECTIVE_S)

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    # Exchanges, of anything that can be pickled.

    def all_gather(self, value: T) -> list[T]:
        """Returns the value of every rank, in the order of the ranks."""
        if self.world_size == 1:
            return [value]
        values: list[T] = [value] * self.world_size
        with self._explained():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        with self._explained():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        self.all_gather(None)

    def new_group(self, timeout_s: float | None = None) -> Ranks:
        """Returns the same ranks with exchanges of their own, which do not cross others.

        Each thread that exchanges needs its own. timeout_s: seconds that a rank waits for the last
        one, where that may be long. All ranks call it together.
        """
        other = copy.copy(self)
        if self.world_size > 1:
            with self._explained():
                other._group = _gloo_group(timeout_s or COLLECTIVE_S)
        return other

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Lets the watch say why an exchange has broken; it then ends this process."""
        try:
            yield
        except RuntimeError:
            if self._watch:
                self._watch.wait(SILENCE)
            raise

    # The end.

    def fail(self, reason: str) -> None:
        """Tells the other ranks that this one ends, and why; they end too."""
        if self._watch:
            self._watch.end(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leaves the ranks at the end of a run that went well, when all have come to it."""
        if self._watch:
            self._watch.end(DONE)
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(rank: int, world_size: int) -> dist.Store:
    """Returns the store of all ranks when they have come; UserError if one does not."""
    wait = timedelta(seconds=JOIN_S)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=wait))
        # torchrun's store outlives a restart, with the keys of the attempt before
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"attempt/{attempt}", store)
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(world_size)], wait)
    except RuntimeError as error:
        raise UserError(
            f"torchrun: not all {world_size} ranks have joined within {JOIN_S:g} s "
            f"({str(error).splitlines()[0]}); what the others printed says why"
        ) from None
    return store


def _gloo_group(timeout_s: float) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


class _Watch:
    """A thread that ends this process when another rank has failed, died or hung."""

    def __init__(self, rank: int, world_size: int):
        self._rank = rank
        self._words = [RUNNING] * world_size  # what each rank said last
        self._word = RUNNING  # what this rank says next
        self._group = _gloo_group(SILENCE)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def end(self, word: str) -> None:
        """Says DONE, or why this rank fails; returns when the others have heard it."""
        self._word = word
        self._thread.join()

    def wait(self, seconds: float) -> None:
        """Waits for the watch to end this process."""
        self._thread.join(seconds)

    def _listen(self) -> None:
        while not all(word == DONE for word in self._words):
            time.sleep(BEAT)
            reason = ""
            try:
                dist.all_gather_object(self._words, self._word, group=self._group)
            except RuntimeError as error:
                reason = f"a rank has died or hangs ({str(error).splitlines()[0]})"
            if self._word not in (RUNNING, DONE):
                return  # the main thread ends this rank
            for word in self._words:
                if word not in (RUNNING, DONE):
                    reason = word
            if reason:
                # not sys.stderr, which torch swaps while it prints the main thread's traceback
                print(f"rank {self._rank} ends: {reason}", file=sys.__stderr__, flush=True)
                time.sleep(BEAT)  # the exchange of slower ranks needs this one to its end
                os._exit(1)  # the main thread may wait in a collective that never ends


@contextmanager
def ending_together(ranks: Ranks) -> Iterator[None]:
    """Ends the process at once on an error, where an orderly end would wait forever.

    That is with other ranks, which may wait in a collective, and beside a rollout's thread. The
    other ranks are told why. A UserError is printed by rank 0, which has it
    itself or hears of it.
    """
    try:
        yield
    except BaseException as error:
        if ranks.world_size == 1 and not running():
            raise
        expected = isinstance(error, UserError | KeyboardInterrupt)
        reason = str(error).split("\n")[0] or type(error).__name__
        if not expected and "peer" not in reason:  # else another rank has gone, and says why
            traceback.print_exc()
        if ranks.first or not expected:
            print(f"train.py: {reason}; go on with --resume", file=sys.stderr, flush=True)
        ranks.fail(reason)
        sys.stdout.flush()
        if isinstance(error, UserError):
            os._exit(2)
        os._exit(INTERRUPTED if expected else 1)


def rollout_timeout_s(config: Config) -> float:
    """Returns the seconds that ranks wait for the slowest rollout: all turns at their slowest.

    A rank that has died or hangs is noticed by the watch, long before.
    """
    return (1 + RETRIES) * config.rollout.turns * TURN_S


# Sharding.


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


def backward(loss: Tensor, model: Qwen3, ranks: Ranks, *, last: bool) -> None:
    """Adds the gradients of a micro-batch's loss to the model's.

    last: of the step's micro-batches; replicas (HSDP) all-reduce once, after it.
    """
    if ranks.mesh is not None:
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)
        loss = loss * ranks.world_size  # FSDP averages over the ranks; the sum is meant
    loss.backward()
