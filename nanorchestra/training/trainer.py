"""Training steps: packs groups of trajectories without padding, computes log-probabilities with the engine's own model, updates.

A pack is a tree: what all prompts begin with is there once, each prompt once, and what samples of it have in common (the thought that
reads the prompt) once. `ops.packed_attention` lets every id attend to its own past, so that the gradients are exactly those of the
whole sequences.
The loss is a sum over sampled ids divided by their number in the whole step, so that neither packing nor micro-batches nor ranks change it.
All ranks call a step with the same groups; each takes a share of equal cost, and all do the same number of micro-batches.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nanorchestra.model import lora
from nanorchestra.model.ops import Segment, packed_attention
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.sharded import is_sharded, local
from nanorchestra.records import Trajectory
from nanorchestra.training import objectives as grpo
from nanorchestra.training.logprobs import full_kl, token_logprobs
from nanorchestra.training.optimizers import Muon
from nanorchestra.training.plan import model_flops
from nanorchestra.training.ranks import Ranks, shard_model

SHARED_IDS = 16  # samples share what they have in common if it is at least so long: a shorter segment costs more than it saves


@dataclass
class Sample:
    """What follows the prompt in one attempt, or in one turn of it: ids, which were sampled, and per id the sampler's log-probability.

    The advantage is one for all ids, or a list with one for each. `trajectory_ids`: the sampled ids of the whole attempt, where that is divided
    over several samples, as when every turn has a prompt of its own; the loss then still weighs attempts, not samples.
    A policy step leaves in `trainer_logprobs` what the model makes of the sampled ids before its update, on the rank that computed them;
    `trajectory` says whose they are.
    """

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float] | None = None
    advantage: float | list[float] = 0.0
    trajectory_ids: int | None = None
    trajectory: Trajectory | None = field(default=None, compare=False, repr=False)
    trainer_logprobs: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def count(self) -> int:
        return sum(self.sampled)


@dataclass
class Group:
    """A prompt and the samples that continue it."""

    prompt: list[int]
    samples: list[Sample]

    @classmethod
    def of(cls, parts: Sequence[tuple[list[int], Sample]]) -> Group:
        """Samples whose prompts may differ: the group's is what all prompts begin with, and the rest of each stands in its sample, not sampled."""
        common = agree([prompt for prompt, _ in parts])
        samples = []
        for prompt, sample in parts:
            rest, none = prompt[common:], [0.0] * (len(prompt) - common)
            samples.append(
                Sample(
                    rest + sample.ids,
                    [False] * len(rest) + sample.sampled,
                    sample.logprobs and none + sample.logprobs,
                    none + sample.advantage
                    if isinstance(sample.advantage, list)
                    else sample.advantage,
                    sample.trajectory_ids,
                    sample.trajectory,
                )
            )
        return cls(parts[0][0][:common], samples)

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(len(sample.ids) for sample in self.samples)

    @property
    def sampled(self) -> int:
        return sum(sample.count for sample in self.samples)


@dataclass
class Packed:
    """One micro-batch. tokens, positions [T]; for the N sampled ids: source [N] (whose hidden state predicts it), targets,
    old_logprobs, advantages [N], sequences [N] (which sample it is of), trajectory_ids [N] (how many its trajectory has); `attend` closes over
    the segments; `pairs` of an id with itself and with each one before it are attended."""

    tokens: Tensor
    positions: Tensor
    attend: object
    source: Tensor
    targets: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    trajectory_ids: Tensor
    pairs: int


def pack(
    groups: Sequence[Group], device: torch.device | str = "cpu", attention: str = "triton"
) -> Packed:
    """Lays out every id once: what the prompts of a world begin with, then each prompt's rest and its samples as a tree; no padding.
    attention: ops.packed_attention's kernel.

    Without groups it is one id that predicts nothing, for a rank that has no work but must take part in forward and backward.
    """
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []

    def lay(ids: Sequence[int], position: int, prefix: Segment | None) -> Segment:
        segments.append(
            Segment(len(tokens), len(ids), *((prefix.start, prefix.length) if prefix else ()))
        )
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))
        return segments[-1]

    def lay_tree(
        samples: list[Sample], places: list[list[int]], depth: int, offset: int, prefix: Segment
    ) -> None:
        """Lays the rest of samples that agree in their first `depth` ids; those that go on alike share a segment. `offset` is the position
        of their first id, after the prompt; `places[i]` collects where in the pack the ids of sample i are."""
        families: dict[tuple[int, ...], list[int]] = {}
        for i, sample in enumerate(samples):
            if len(sample.ids) > depth:
                families.setdefault(tuple(sample.ids[depth : depth + SHARED_IDS]), []).append(i)
        for family in families.values():
            members = [samples[i] for i in family]
            end = depth + agree([member.ids[depth:] for member in members])
            segment = lay(members[0].ids[depth:end], offset + depth, prefix)
            for i in family:
                places[i].extend(range(segment.start, segment.start + segment.length))
            if len(family) > 1:
                lay_tree(members, [places[i] for i in family], end, offset, segment)

    source: list[int] = []
    targets: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    if not groups:
        lay([0], 0, None)
    sequences: list[int] = []
    trajectory_ids: list[int] = []
    number = 0
    worlds: dict[
        tuple[int, ...], list[list[int]]
    ] = {}  # prompts that begin alike: those of one world
    for group in groups:
        worlds.setdefault(tuple(group.prompt[:SHARED_IDS]), []).append(group.prompt)
    beginnings = {}
    for key, prompts in worlds.items():
        common = (
            min(agree(prompts), min(map(len, prompts)) - 1) if len(prompts) > 1 else 0
        )  # each keeps an id of its own
        beginnings[key] = common, lay(prompts[0][:common], 0, None) if common else None
    for group in groups:
        common, beginning = beginnings[tuple(group.prompt[:SHARED_IDS])]
        prompt = lay(group.prompt[common:], common, beginning)
        places: list[list[int]] = [[] for _ in group.samples]
        lay_tree(group.samples, places, 0, len(group.prompt), prompt)
        for sample, place in zip(group.samples, places):
            before = [prompt.start + prompt.length - 1, *place]
            count = sample.count
            sequences += [number] * count
            trajectory_ids += [sample.trajectory_ids or count] * count
            number += 1
            for i, (token, sampled) in enumerate(zip(sample.ids, sample.sampled, strict=True)):
                if sampled:
                    source.append(before[i])
                    targets.append(token)
                    old.append(sample.logprobs[i] if sample.logprobs else 0.0)
                    advantages.append(
                        sample.advantage[i]
                        if isinstance(sample.advantage, list)
                        else sample.advantage
                    )
    as_ids = dict(dtype=torch.int64, device=device)
    as_numbers = dict(dtype=torch.float32, device=device)
    return Packed(
        torch.tensor(tokens, **as_ids),
        torch.tensor(positions, **as_ids),
        packed_attention(segments, attention),
        torch.tensor(source, **as_ids),
        torch.tensor(targets, **as_ids),
        torch.tensor(old, **as_numbers),
        torch.tensor(advantages, **as_numbers),
        torch.tensor(sequences, **as_ids),
        torch.tensor(trajectory_ids, **as_ids),
        sum(positions) + len(positions),
    )


def agree(sequences: Sequence[Sequence[int]]) -> int:
    """How many ids all of them begin with."""
    first, last = (
        min(sequences),
        max(sequences),
    )  # in lexicographic order: what these two share, all share
    return next(
        (i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last))
    )


def micro_batches(groups: Sequence[Group], token_budget: int) -> Iterator[list[Group]]:
    """Consecutive groups, as many as fit `token_budget` packed tokens; a group larger than that goes alone."""
    batch: list[Group] = []
    used = 0
    for group in groups:
        if batch and used + group.tokens > token_budget:
            yield batch
            batch, used = [], 0
        batch.append(group)
        used += group.tokens
    if batch:
        yield batch


def split_groups(
    groups: Sequence[Group], limit: float, size: Callable[[Group], float]
) -> list[Group]:
    """The groups in their order, where one whose size is above the limit gives way to its halves, down to single samples.

    The gradient is the same: it is a sum over samples, whose advantages are given.
    """
    parts: list[Group] = []
    for group in groups:
        if size(group) > limit and len(group.samples) > 1:
            half = len(group.samples) // 2
            parts += split_groups(
                [
                    Group(group.prompt, group.samples[:half]),
                    Group(group.prompt, group.samples[half:]),
                ],
                limit,
                size,
            )
        else:
            parts.append(group)
    return parts


def balance(
    groups: Sequence[Group], ranks: int, cost: Callable[[Group], float]
) -> list[list[Group]]:
    """The groups of each rank, in their order. The dearest is given first, each to whoever has least (Graham 1969: at most 4/3 of the best);
    one that costs more than a rank's fair share is split."""
    groups = split_groups(groups, sum(map(cost, groups)) / ranks, cost)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for i in sorted(range(len(groups)), key=lambda i: -cost(groups[i])):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += cost(groups[i])
    return [[groups[i] for i in sorted(share)] for share in shares]


def step_counts(
    groups: Sequence[Group], aggregation: str = "token", length: int = 1
) -> tuple[float, float]:
    """The sampled ids, and the loss's normaliser (grpo.normaliser), of these groups; both add up over ranks."""
    samples = [sample for group in groups for sample in group.samples if sample.count]
    count = float(sum(sample.count for sample in samples))
    trajectories = sum(sample.count / (sample.trajectory_ids or sample.count) for sample in samples)
    return count, {"token": count, "sequence": trajectories, "constant": trajectories * length}[
        aggregation
    ]


@dataclass(frozen=True)
class Schedule:
    """Learning rate: `warmup_steps` up, at its peak for the first `hold` of the steps, then linearly down to `final_fraction` of it."""

    peak: float
    steps: int
    warmup_steps: int = 5
    final_fraction: float = 0.1
    hold: float = 0.0

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        start = max(self.warmup_steps, self.hold * self.steps)
        done = max(0.0, step - start) / max(1.0, self.steps - start)
        return self.peak * (1 - (1 - self.final_fraction) * min(1.0, done))


class Trainer:
    """A model, its optimizer, and optionally a frozen reference, on one rank or sharded over many. Owns no data and draws nothing at random.

    The model is plain, or has been through distributed.shard_model with the same `ranks`. `dtype` is what a sharded reference computes in.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        vocab_limit: int,
        optimizer: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        token_budget: int = 16384,
        ranks: Ranks | None = None,
        dtype: torch.dtype = torch.float32,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        attention: str = "triton",
    ):
        self.model, self.vocab_limit, self.ranks = (
            model,
            vocab_limit,
            ranks or Ranks(device=model.embed_tokens.weight.device),
        )
        self.betas, self.weight_decay, self.grad_clip, self.token_budget = (
            betas,
            weight_decay,
            grad_clip,
            token_budget,
        )
        self.dtype, self.cpu_offload, self.attention = dtype, cpu_offload, attention
        for block in model.layers:
            block.recompute = activation_checkpointing
        self.reference: Qwen3 | lora.Base | None = None
        self.new_optimizer(optimizer)

    def new_optimizer(self, kind: str) -> None:
        """Forgets all moments. "adamw"; or "muon": Muon for the matrices of the blocks, AdamW for everything else."""
        matrices = (
            [p for p in self.model.layers.parameters() if p.dim() == 2 and p.requires_grad]
            if kind == "muon"
            else []
        )
        taken = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in taken]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [
                    {
                        "params": [p for p in others if p.dim() >= 2],
                        "weight_decay": self.weight_decay,
                    },
                    {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
                ],
                lr=0.0,
                betas=self.betas,
                fused=True,
            )
        ]
        if matrices:
            self.optimizers.append(Muon(matrices, weight_decay=self.weight_decay))
        self.optimizer_kind = kind

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    def freeze_reference(self) -> None:
        """Keeps a copy of the model as it is now, for the KL term; of a model with adapters (lora.py), whose base does not change, no copy."""
        if lora.adapters(self.model):
            self.reference = lora.Base(self.model)
            return
        if self.ranks.mesh is None:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
            return
        with torch.device("meta"):
            reference = shard_model(
                Qwen3(self.model.config).requires_grad_(False),
                self.ranks,
                self.dtype,
                cpu_offload=self.cpu_offload,
            )
        self.reference = reference.to_empty(device=self.model.norm.device)
        with torch.no_grad():
            for copied, parameter in zip(
                reference.parameters(), self.model.parameters(), strict=True
            ):
                local(copied).copy_(local(parameter))

    def _share(self, groups: Sequence[Group]) -> list[list[Group]]:
        """This rank's micro-batches, as many as every other rank has: the last ones may be empty."""
        config = self.model.config
        per_token = sum(p.numel() for p in self.model.layers.parameters() if p.dim() == 2)
        per_pair = (
            2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
        )  # in the same unit: a multiplication

        def cost(group: Group) -> float:
            prompt = len(group.prompt)
            pairs = prompt * prompt / 2 + sum(
                len(sample.ids) * (prompt + len(sample.ids) / 2) for sample in group.samples
            )
            return per_token * group.tokens + per_pair * pairs

        groups = split_groups(groups, self.token_budget, lambda group: group.tokens)
        shares = [groups] if self.ranks.world == 1 else balance(groups, self.ranks.world, cost)
        batches = [list(micro_batches(share, self.token_budget)) for share in shares]
        return batches[self.ranks.rank] + [[]] * (
            max(map(len, batches)) - len(batches[self.ranks.rank])
        )

    def _backward(self, loss: Tensor, last: bool) -> None:
        """FSDP takes the mean over the ranks where the sum is meant. Replicas (HSDP) sum up once, after the last micro-batch of a step."""
        if self.ranks.mesh is not None:
            self.model.set_is_last_backward(last)
            self.model.set_requires_all_reduce(last)
            loss = loss * self.ranks.world
        loss.backward()

    def supervised_step(self, groups: Sequence[Group], learning_rate: float) -> dict[str, float]:
        """One update on demonstrations; returns the mean loss in nats per demonstrated id, the gradient norm, the tokens packed and the FLOPs."""
        normaliser = float(sum(group.sampled for group in groups))
        metrics = {"loss": 0.0, "entropy": 0.0, "flops": 0.0}
        batches = self._share(groups)
        for i, batch in enumerate(batches):
            packed = pack(batch, self.device, self.attention)
            hidden = self.model(packed.tokens, packed.positions, packed.attend)
            logprobs, entropy = self._logprobs(hidden, packed, 1.0)
            loss = grpo.supervised_loss(logprobs, normaliser=normaliser)
            self._backward(loss, last=i == len(batches) - 1)
            metrics["loss"] += loss.item()
            metrics["entropy"] += float(entropy.sum()) / normaliser
            metrics["flops"] += self._flops(packed)
        return self._finish(metrics, learning_rate, groups)

    def policy_step(
        self,
        groups: Sequence[Group],
        learning_rate: float,
        *,
        temperature: float = 1.0,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        kl_coef: float = 0.0,
        kl: str = "full",
        surrogate: str = "clip",
        aggregation: str = "token",
        length: int = 1,
        importance_cap: float | None = None,
    ) -> dict[str, float]:
        """One update. `kl`: "full" is the exact KL(policy || reference) over the vocabulary, "k2" and "k3" its estimates; the rest: grpo.py.

        With an `importance_cap` the old log-probabilities are the trainer's own, which with one update a step are the present ones, so that
        no second pass is needed; the sampler's, with other arithmetic or weights a step old, enter as the truncated weight. Without it they
        are taken for the old ones, and the clip of the ratio bounds both.
        Metrics are means over the sampled ids of the step; `logprob_gap` is mean |trainer - sampler| of the log-probabilities, `logprob_gap_max`
        the largest, `flops` plan.model_flops of all ranks.
        """
        count, normaliser = step_counts(groups, aggregation, length)
        metrics: dict[str, float] = {}
        batches, largest_gap = self._share(groups), 0.0
        for i, batch in enumerate(batches):
            packed = pack(batch, self.device, self.attention)
            hidden = self.model(packed.tokens, packed.positions, packed.attend)
            logprobs, entropy = self._logprobs(hidden, packed, temperature)
            samples = [sample for group in batch for sample in group.samples]
            for sample, part in zip(
                samples, logprobs.detach().split([sample.count for sample in samples])
            ):
                sample.trainer_logprobs = part
            weights = 1.0 / packed.trajectory_ids if aggregation == "sequence" else None
            ref_logprobs, penalty = None, None
            if kl_coef:
                if self.reference is None:
                    raise ValueError("kl_coef needs freeze_reference() before the first step")
                with torch.no_grad():
                    ref_hidden = self.reference(packed.tokens, packed.positions, packed.attend)
                if kl == "full":
                    kls = full_kl(
                        hidden[packed.source],
                        ref_hidden[packed.source],
                        self.model.output_weight,
                        self.reference.output_weight,
                        temperature=temperature,
                        vocab_limit=self.vocab_limit,
                    )
                    penalty = (kls if weights is None else kls * weights).sum() / normaliser
                else:
                    with torch.no_grad():
                        ref_logprobs, _ = token_logprobs(
                            ref_hidden[packed.source],
                            self.reference.output_weight,
                            packed.targets,
                            temperature=temperature,
                            vocab_limit=self.vocab_limit,
                        )
            old = packed.old_logprobs if importance_cap is None else logprobs.detach()
            loss, terms = grpo.policy_loss(
                logprobs,
                old,
                packed.advantages,
                normaliser=normaliser,
                clip_low=clip_low,
                clip_high=clip_high,
                dual_clip=dual_clip,
                ref_logprobs=ref_logprobs,
                kl_coef=0.0 if kl == "full" else kl_coef,
                kl_estimator="k2" if kl == "full" else kl,
                surrogate=surrogate,
                sequences=packed.sequences,
                weights=weights,
                importance_cap=importance_cap,
                sampler_logprobs=None if importance_cap is None else packed.old_logprobs,
                count=count,
            )
            if penalty is not None:
                terms["kl"] = (kls.detach().sum() / count).item()
                loss = loss + kl_coef * penalty
            self._backward(loss, last=i == len(batches) - 1)
            gap = (logprobs.detach() - packed.old_logprobs).abs()
            largest_gap = max(largest_gap, float(gap.max()) if len(gap) else 0.0)
            terms |= {
                "loss": loss.item(),
                "entropy": float(entropy.sum()) / count,
                "logprob_gap": float(gap.sum()) / count,
                "flops": self._flops(packed, bool(kl_coef)),
            }
            for name, value in terms.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return self._finish(metrics, learning_rate, groups) | {
            "logprob_gap_max": max(self.ranks.gather(largest_gap))
        }

    def _logprobs(
        self, hidden: Tensor, packed: Packed, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden[packed.source],
            self.model.output_weight,
            packed.targets,
            temperature=temperature,
            vocab_limit=self.vocab_limit,
        )

    def _flops(self, packed: Packed, reference: bool = False) -> float:
        return model_flops(
            self.model.config,
            len(packed.tokens),
            packed.pairs,
            len(packed.targets),
            bool(lora.adapters(self.model)),
            reference,
        )

    def _finish(
        self, metrics: dict[str, float], learning_rate: float, groups: Sequence[Group]
    ) -> dict[str, float]:
        """The update, and the metrics of all ranks. A loss that is not finite leaves everything as it was: "skipped" is 1."""
        metrics = self.ranks.sum(metrics)
        if (
            isinstance(self.reference, Qwen3) and self.ranks.mesh is not None
        ):  # no backward has resharded it
            for module in (self.reference, *self.reference.layers):
                module.reshard()
        if math.isfinite(metrics["loss"]):
            metrics |= self._update(learning_rate)
        else:
            metrics |= {"grad_norm": math.nan, "learning_rate": learning_rate, "skipped": 1.0}
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        return metrics | {"tokens": float(sum(group.tokens for group in groups))}

    def _update(self, learning_rate: float) -> dict[str, float]:
        """Clips, steps unless the gradient is not finite, clears."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        if is_sharded(norm):
            norm = norm.full_tensor()
        finite = bool(torch.isfinite(norm))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm.item(), "learning_rate": learning_rate} | (
            {} if finite else {"skipped": 1.0}
        )

    def tensors(self) -> dict[str, Tensor]:
        """All that a run needs to go on exactly, weights, moments and reference, by name, whatever ranks hold it. Writing to one writes to the
        trainer's own. Moments that no step has made yet are zero, as the first step would have found them."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state[p]
                if not state and isinstance(optimizer, Muon):
                    state["momentum_buffer"] = torch.zeros_like(p)
                elif not state:
                    state |= {
                        "step": torch.zeros((), device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
                tensors |= {
                    f"optimizer.{names[id(p)]}.{key}": value for key, value in state.items()
                }
        if self.reference is not None:
            tensors |= {
                f"reference.{name}": p.detach() for name, p in self.reference.named_parameters()
            }
        return tensors

    def prepare(self, optimizer: str, reference: bool) -> dict[str, Tensor]:
        """`tensors()` of a trainer with that optimizer, and a reference or none, for a checkpoint to be read into."""
        self.new_optimizer(optimizer)
        self.reference = None
        if reference:
            self.freeze_reference()
        return self.tensors()
