"""The ranks of a training run: how they start, what they tell one another, and how a model is sharded over them.

`Ranks.start` reads what torchrun has put into the environment; without torchrun there is one rank, and everything here does nothing.
Every method named here is to be called on all ranks alike. A rank that fails tells the others why; one that dies without a word, or whose
machine is gone, is missed after SILENCE seconds: the rest then end with the reason, so that torchrun can start them all again.
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
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from nanorchestra.errors import UserError

if TYPE_CHECKING:  # slow to import, and one process does without
    from torch.distributed.device_mesh import DeviceMesh

    from nanorchestra.model.qwen3 import Qwen3

BEAT = 2.0  # seconds between signs of life,
SILENCE = 30.0  # and after how many without one a rank counts as dead
T, R = TypeVar("T"), TypeVar("R")


class Told(UserError):
    """A UserError that all ranks know of."""


class Ranks:
    """This process among the ranks of the run. `rank` 0 writes the records; `device` is where this rank computes.

    `mesh` is None while parameters are plain tensors (one process in float32 on a CPU), else a device mesh whose last dimension "shard"
    holds the weights between its ranks; with a first dimension "replicate" each group of ranks that shard has a whole copy (HSDP).
    """

    def __init__(self, rank: int = 0, world: int = 1, device: torch.device | str = "cpu"):
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.mesh: DeviceMesh | None = None
        self._control: Any = None  # gloo: counts and objects travel here, whatever the device
        self._background: Any = (
            None  # gloo: for checkpoints that are written while training goes on
        )
        self._watch: _Watch | None = None

    @classmethod
    def start(
        cls,
        device: str = "cpu",
        *,
        shard: str = "all",
        sharded: bool = False,
        timeout: float = 1800.0,
    ) -> Ranks:
        """Joins the ranks that torchrun has started, if it has. device: "cpu" (gloo) or "cuda" (nccl; each rank takes its own).

        shard "all": every rank holds an equal share of the weights; "node": the ranks of a node hold them between them, and the nodes are
        replicas. sharded: shard on one rank too, for its mixed precision. timeout: seconds that ranks wait for one another in a
        collective; rollouts take different times. UserError if a GPU is missing, or if nodes have different numbers of ranks.
        """
        rank, world, local = (
            int(os.environ.get(name, default))
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
        )
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if device == "cuda":
            if local >= torch.cuda.device_count():
                raise UserError(
                    f"torchrun: rank {rank} has no GPU: {torch.cuda.device_count()} on this machine; start at most so many processes per node"
                )
            torch.cuda.set_device(local)
        ranks = cls(rank, world, f"cuda:{local}" if device == "cuda" else device)
        if world == 1 and not sharded:
            return ranks
        if world % per_node:
            raise UserError(
                f"torchrun: {world} ranks are not a whole number of nodes of {per_node}; start equally many on every node"
            )
        limit, backend = (
            timedelta(seconds=timeout),
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        )
        if world == 1:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
            )
        else:
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
            # torchrun's store may outlive a restart, and with it what the ranks before it have left there
            store = dist.PrefixStore(
                f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
            )
            store.set_timeout(limit)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("groups", store),
                rank=rank,
                world_size=world,
                timeout=limit,
            )
            ranks._control, ranks._background = (
                dist.new_group(backend="gloo", timeout=limit) for _ in range(2)
            )
            ranks._watch = _Watch(dist.PrefixStore("watch", store), rank, world)
        nodes = world // per_node if shard == "node" else 1
        shape, names = (
            ((nodes, world // nodes), ("replicate", "shard"))
            if nodes > 1
            else ((world,), ("shard",))
        )
        ranks.mesh = dist.init_device_mesh(device, shape, mesh_dim_names=names)
        return ranks

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes and prints."""
        return self.rank == 0

    @property
    def background(self) -> Any:
        """A process group for one thread beside the main one; None with one process."""
        return self._background

    def beside(self, timeout: float = 1800.0) -> Ranks:
        """The same ranks for one more thread: what it exchanges with the others does not cross what this one does. Seconds as for `start`."""
        other = copy.copy(self)
        if self.world > 1:
            other._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return other

    def gather(self, value: T) -> list[T]:
        """Every rank's value (anything that can be pickled), on every rank. Told: one of them is a UserError (`together`)."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._control)
        refusal = next((value for value in values if isinstance(value, UserError)), None)
        if refusal is not None:
            raise Told(*refusal.args)
        return values

    def map(
        self, function: Callable[[list[T]], Sequence[R]], items: Sequence[T], together: int = 1
    ) -> list[R]:
        """function(items), a list in their order, where each rank has computed it for its share; runs of `together` items are not parted.

        Item i is the business of rank (i // together) % world, so the shares have nearly the same size.
        """
        if self.world == 1:
            return list(function(list(items)))
        places = [
            [i for i in range(len(items)) if i // together % self.world == rank]
            for rank in range(self.world)
        ]
        results: list[Any] = [None] * len(items)
        for indices, values in zip(
            places, self.gather(list(function([items[i] for i in places[self.rank]])))
        ):
            for i, value in zip(indices, values, strict=True):
                results[i] = value
        return results

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """The sum over the ranks of each value, in float64; the names are the same on all."""
        if self.world == 1 or not values:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(total, group=self._control)
        return dict(zip(values, total.tolist()))

    def any(self, flag: bool) -> bool:
        """Whether it is true on some rank: what all ranks must decide alike."""
        return self.sum({"flag": float(flag)})["flag"] > 0

    def together(self, function: Callable[[], R]) -> R:
        """function(); a UserError on any rank is raised on all, so that none waits for one that has given up: here, or where the function gathers."""
        try:
            result = function()
        except Told:
            raise
        except UserError as refused:
            self.gather(refused)
            raise  # one rank
        self.gather(None)
        return result

    def fail(self, reason: str) -> None:
        """Tells the other ranks that this one ends, and why. They end too."""
        if self._watch is not None:
            self._watch.fail(f"rank {self.rank}: {reason}")

    def close(self) -> None:
        """The end of a run that went well: waits for all ranks and parts from them."""
        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized():
            if self.world > 1:
                dist.barrier(group=self._control)
            dist.destroy_process_group()


class _Watch:
    """A thread that gives signs of life in the store, and ends this process when a rank has failed or fallen silent.

    Rank 0 watches all others, they watch rank 0 and the word "failed". Collectives alone would not do: a rank whose machine is gone is
    waited for until their time-out, which must be long.
    """

    def __init__(self, store: Any, rank: int, world: int):
        mine = store.clone()  # a connection of its own: the main thread may be waiting on the other
        mine.set_timeout(timedelta(seconds=SILENCE))
        self.rank, self.store = rank, mine
        self.watched = list(range(1, world)) if rank == 0 else [0]
        self._stopped = threading.Event()
        self.store.set(f"beat/{rank}", "0")
        threading.Thread(target=self._run, daemon=True, name="watch").start()

    def fail(self, reason: str) -> None:
        self._stopped.set()
        with suppress(Exception):  # the store may be gone with the rank that had it
            if self.store.check(["failed"]):  # what happens here comes of that
                print(
                    f"rank {self.rank}: before that, {self.store.get('failed').decode()}",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                self.store.set("failed", reason)

    def stop(self) -> None:
        self._stopped.set()
        with suppress(Exception):
            self.store.set(f"beat/{self.rank}", "done")

    def _run(self) -> None:
        heard = {rank: ("", time.monotonic()) for rank in self.watched}
        count = 0
        while not self._stopped.wait(BEAT):
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", str(count))
                if self.store.check(["failed"]):
                    self._end(self.store.get("failed").decode())
                for rank in self.watched:
                    beat = (
                        self.store.get(f"beat/{rank}").decode()
                        if self.store.check([f"beat/{rank}"])
                        else ""
                    )
                    if beat != heard[rank][0] or beat == "done":
                        heard[rank] = beat, time.monotonic()
                    elif time.monotonic() - heard[rank][1] > SILENCE:
                        reason = f"rank {rank}: no sign of life for {SILENCE:.0f} s"
                        self.store.set("failed", reason)
                        self._end(reason)
            except Exception as error:  # the store is with torchrun, or with rank 0
                if not self._stopped.is_set():
                    self._end(
                        f"the store of the ranks is gone ({type(error).__name__}): the process that had it has ended"
                    )

    def _end(self, reason: str) -> None:
        if not self._stopped.is_set():
            print(f"rank {self.rank} ends: {reason}", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may wait in a collective that never ends


def shard_model(
    model: Qwen3, ranks: Ranks, dtype: torch.dtype = torch.float32, *, cpu_offload: bool = False
) -> Qwen3:
    """FSDP2 (Zhao et al. 2023, arXiv 2304.11277) for a model of master weights, float32 as a rule, in place: its layers and the root, whose
    embeddings and output matrix stay gathered from the root's forward to the end of the backward, since the log-probabilities use them
    outside of a forward.

    Forward and backward compute in `dtype`, gradients are reduced in the master weights' dtype and averaged over the ranks. Frozen parameters
    beside trained ones may have another dtype than those (lora.py). cpu_offload: master weights, gradients and moments live in host memory, and
    the optimizer steps there. Without a mesh the model stays as it is.
    """
    if ranks.mesh is None:
        return model
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    master = next((p.dtype for p in model.parameters() if p.requires_grad), model.norm.dtype)
    options = {
        "mesh": ranks.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == master else dtype,
            reduce_dtype=master,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=ranks.device.type == "cuda")
        if cpu_offload
        else OffloadPolicy(),
    }
    layers = list(model.layers)
    for layer in layers:
        fully_shard(
            layer, reshard_after_forward=layer is not layers[-1], **options
        )  # the last one's backward comes at once
    fully_shard(model, reshard_after_forward=False, **options)
    for layer, following in zip(layers, layers[1:]):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    return model
