"""The ranks of a run: how they join, what they exchange, how they shard a model.

`Ranks.start` reads the environment that torchrun sets. Without torchrun there is one rank, and
every exchange is a no-op. Exchanges are collectives: all ranks call them in the same order. When a
rank fails or dies, torchrun ends the others; an exchange with a rank that hangs fails after
COLLECTIVE_S seconds.
"""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

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

from nanorchestra.errors import require
from nanorchestra.model.qwen3 import Qwen3

COLLECTIVE_S = 1800.0  # of an exchange, unless its group has a time-out of its own
T = TypeVar("T")


class Ranks:
    """This process among the ranks of a run. Rank 0 writes the records.

    `mesh` is None while parameters are plain tensors: one process without mixed precision. Else it
    is a device mesh whose last dimension "shard" divides the weights. With a first dimension
    "replicate" each group of ranks that shards has a whole copy (HSDP). `group` is of gloo, also
    beside NCCL.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, device: torch.device | str = "cpu"):
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        self.mesh: DeviceMesh | None = None
        self.group: dist.ProcessGroup | None = None

    @classmethod
    def start(
        cls, device: str = "cpu", *, shard: str = "all", mixed_precision: bool = False
    ) -> Ranks:
        """Joins the ranks that torchrun has started; without torchrun returns a single rank.

        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank). shard: "all" divides the weights by
        all ranks, "node" by those of a node, with a replica per node. mixed_precision: a single
        rank has a mesh too, as FSDP2 is what computes in another dtype. UserError for fewer GPUs
        than ranks, and for unequal nodes.
        """
        ranks = cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
        ranks._choose_device(device)
        if ranks.world_size > 1 or mixed_precision:
            ranks._init_groups(shard)
        return ranks

    def _choose_device(self, device):
        """Takes this rank's GPU, if it trains on GPUs."""
        self.device = torch.device(device)
        if device != "cuda":
            return
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        count = torch.cuda.device_count()
        require(
            local_rank < count,
            f"torchrun: rank {self.rank} has no GPU; start at most {count} per node",
        )
        torch.cuda.set_device(local_rank)
        self.device = torch.device(f"cuda:{local_rank}")

    def _init_groups(self, shard):
        """Makes the default process group, the group of the exchanges, and the mesh."""
        size = self.world_size
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        require(
            size % per_node == 0,
            f"torchrun: {size} ranks on nodes of {per_node}; start equally many on every node",
        )
        kind, timeout = self.device.type, timedelta(seconds=COLLECTIVE_S)
        store = dist.HashStore()
        if size > 1:
            store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            # torchrun's store outlives a restart, with the keys of the attempt before
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
            store = dist.PrefixStore(f"attempt/{attempt}", store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=size,
            timeout=timeout,
        )
        self.group = self.with_own_group().group
        shape, dimensions = (size,), ("shard",)
        if shard == "node" and size > per_node:
            shape, dimensions = (size // per_node, per_node), ("replicate", "shard")
        self.mesh = dist.init_device_mesh(kind, shape, mesh_dim_names=dimensions)

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def with_own_group(self, timeout_s: float | None = None) -> Ranks:
        """Returns the same ranks with a group of their own: for a thread, or another time-out.

        Its exchanges do not cross those of this object. An exchange fails after `timeout_s`
        seconds, by default COLLECTIVE_S. All ranks call it together.
        """
        other = copy.copy(self)
        if self.world_size > 1:
            timeout = timedelta(seconds=timeout_s or COLLECTIVE_S)
            other.group = dist.new_group(backend="gloo", timeout=timeout)
        return other

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.all_gather(None)

    def broadcast(self, value: T) -> T:
        """Returns rank 0's value (pickled)."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Returns every rank's value (pickled), in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def close(self) -> None:
        """Leaves the ranks at the end of a run that went well, when all have come to it."""
        self.barrier()
        if dist.is_initialized():
            dist.destroy_process_group()


def backward(loss: Tensor, model: Qwen3, ranks: Ranks, *, last: bool) -> None:
    """Adds to the gradients those of this rank's `loss`, a share of the sum over all ranks.

    Replicas (HSDP) all-reduce once, after the `last` micro-batch.
    """
    if ranks.mesh is not None:
        model.set_is_last_backward(last)
        model.set_requires_all_reduce(last)
        loss = loss * ranks.world_size  # FSDP averages over the ranks; the sum is meant
    loss.backward()


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
