"""The ranks of a run: how they join, what they exchange, how they end, how they shard a model.

`Ranks.start` reads the environment that torchrun sets. Without torchrun there is one rank, and
every exchange is a no-op. Exchanges are collectives: all ranks call them in the same order. A rank
that fails publishes its reason; one that dies or hangs is missed after SILENCE seconds. The other
ranks then end with that reason, so that torchrun can start all of them again.
"""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from nanorchestra.errors import UserError
from nanorchestra.model.qwen3 import Qwen3

TIMEOUT = timedelta(seconds=1800)  # of a collective: rollouts of ranks differ in length
BEAT = 2.0  # seconds between two heartbeats of a rank
SILENCE = 30.0  # seconds without a heartbeat after which a rank counts as dead
T, R = TypeVar("T"), TypeVar("R")


class SharedError(UserError):
    """A UserError that every rank has received."""


class Ranks:
    """This process among the ranks of a run. Rank 0 writes the records.

    `mesh` is None while parameters are plain tensors: one process in float32 on a CPU. Else it is a
    device mesh whose last dimension "shard" divides the weights. With a first dimension "replicate"
    each group of ranks that shards has a whole copy (HSDP). `background` is a process group for one
    thread beside the main one.
    """

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | str = "cpu"):
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.mesh: DeviceMesh | None = None
        self.background: dist.ProcessGroup | None = None
        self._control: dist.ProcessGroup | None = None  # gloo, also beside NCCL
        self._watch: _Watch | None = None

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
            if local >= torch.cuda.device_count():
                count = torch.cuda.device_count()
                raise UserError(f"torchrun: rank {rank} has no GPU; start at most {count} per node")
            torch.cuda.set_device(local)
            place = f"cuda:{local}"
        ranks = cls(rank, world, place)
        if world == 1 and not sharded:
            return ranks
        if world % per_node:
            raise UserError(
                f"torchrun: {world} ranks on nodes of {per_node}; start equally many on every node"
            )
        ranks._join("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        shape, dimensions = (world,), ("shard",)
        if shard == "node" and world > per_node:
            shape, dimensions = (world // per_node, per_node), ("replicate", "shard")
        ranks.mesh = dist.init_device_mesh(device, shape, mesh_dim_names=dimensions)
        return ranks

    def _join(self, backend: str) -> None:
        if self.world == 1:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
            return
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
        # torchrun's store outlives a restart, with the keys of the attempt before
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"attempt/{attempt}", store)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("groups", store),
            rank=self.rank,
            world_size=self.world,
            timeout=TIMEOUT,
        )
        self._control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self.background = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._watch = _Watch(dist.PrefixStore("watch", store), self.rank, self.world)

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def beside(self) -> Ranks:
        """Returns the same ranks for one more thread, whose exchanges do not cross this one's."""
        other = copy.copy(self)
        if self.world > 1:
            other._control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return other

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value (pickled); SharedError if one of them is a UserError."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        for value in values:
            if isinstance(value, UserError):
                raise SharedError(*value.args)
        return values

    def map(
        self, function: Callable[[list[T]], Sequence[R]], items: Sequence[T], together: int = 1
    ) -> list[R]:
        """Returns function(items), computed in shares; `together` items in a row share a rank."""
        if self.world == 1:
            return list(function(list(items)))
        shares: list[list[int]] = [[] for _ in range(self.world)]
        for i in range(len(items)):
            shares[i // together % self.world].append(i)
        computed = self.gather(list(function([items[i] for i in shares[self.rank]])))
        results: list[Any] = [None] * len(items)
        for share, values in zip(shares, computed, strict=True):
            for i, value in zip(share, values, strict=True):
                results[i] = value
        return results

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Returns the float64 sum over the ranks of each value; all ranks have the same names."""
        if self.world == 1:
            return dict(values)
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(total, group=self._control)
        return dict(zip(values, total.tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on some rank."""
        return self.sum({"flag": float(flag)})["flag"] > 0

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
        if self._watch is not None:
            self._watch.fail(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """Leaves the ranks at the end of a run that went well, when all have come to it."""
        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized():
            if self.world > 1:
                dist.barrier(group=self._control)
            dist.destroy_process_group()


class _Watch:
    """A thread that writes heartbeats to the store, and ends this process if the run is lost.

    Rank 0 watches all others, and they watch rank 0 and the key "failed". The time-out of a
    collective, which is as long as the longest rollout, would notice too late.
    """

    def __init__(self, store: dist.Store, rank: int, world: int):
        self.rank = rank
        self.store = store.clone()  # its own connection: the main thread may block on the other
        self.store.set_timeout(timedelta(seconds=SILENCE))
        self.watched = list(range(1, world)) if rank == 0 else [0]
        self.stopped = threading.Event()
        self.store.set(f"beat/{rank}", "0")  # reading a missing key would block
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def fail(self, reason: str) -> None:
        self.stopped.set()
        with suppress(Exception):  # the store may be gone with the process that held it
            if not self.store.check(["failed"]):
                self.store.set("failed", reason)
                return
            earlier = self.store.get("failed").decode()
            print(f"rank {self.rank}: before that, {earlier}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self.stopped.set()
        with suppress(Exception):
            self.store.set(f"beat/{self.rank}", "done")

    def _run(self) -> None:
        heard = {rank: (b"", time.monotonic()) for rank in self.watched}
        count = 0
        while not self.stopped.wait(BEAT):
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", str(count))
                reason = self._listen(heard)
            except Exception as error:  # the store is in torchrun, or in rank 0
                reason = f"the store of the ranks has ended ({type(error).__name__})"
            if reason and not self.stopped.is_set():
                print(f"rank {self.rank} ends: {reason}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread may wait in a collective that never ends

    def _listen(self, heard: dict[int, tuple[bytes, float]]) -> str:
        """Why the run is lost; empty if it is not."""
        if self.store.check(["failed"]):
            return self.store.get("failed").decode()
        for rank, (last, when) in heard.items():
            beat = self.store.get(f"beat/{rank}")
            if beat not in (last, b"done"):
                heard[rank] = beat, time.monotonic()
            elif beat != b"done" and time.monotonic() - when > SILENCE:
                reason = f"rank {rank}: no sign of life for {SILENCE:.0f} s"
                self.store.set("failed", reason)
                return reason
        return ""


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
    for layer, following in zip(layers, layers[1:], strict=False):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return model
