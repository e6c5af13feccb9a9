"""Training steps: packs groups of trajectories without padding, computes log-probabilities with the engine's own model, updates.

A pack is a tree: what all prompts begin with is there once, each prompt once, and what samples of it have in common (the thought that
reads the prompt) once. `ops.packed_attention` lets every id attend to its own past, so that the gradients are exactly those of the
whole sequences.
The loss is a sum over sampled ids divided by their number in the whole step, so that neither packing nor micro-batches change it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Iterator, Sequence

import torch
from torch import Tensor

from . import grpo, lora
from .head import full_kl, token_logprobs
from .model import Qwen3
from .ops import Segment, packed_attention

SHARED_IDS = 16            # samples share what they have in common if it is at least so long: a shorter segment costs more than it saves


@dataclass
class Sample:
    """What follows the prompt in one attempt, or in one turn of it: ids, which were sampled, and per id the sampler's log-probability.

    The advantage is one for all ids, or a list with one for each. `trajectory_ids`: the sampled ids of the whole attempt, where that is divided
    over several samples, as when every turn has a prompt of its own; the loss then still weighs attempts, not samples.
    """

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float] | None = None
    advantage: float | list[float] = 0.0
    trajectory_ids: int | None = None

    @property
    def count(self) -> int:
        return sum(self.sampled)


@dataclass
class Group:
    """A prompt and the samples that continue it."""

    prompt: list[int]
    samples: list[Sample]

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
    the segments."""

    tokens: Tensor
    positions: Tensor
    attend: object
    source: Tensor
    targets: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    trajectory_ids: Tensor


def pack(groups: Sequence[Group], device: torch.device | str = "cpu") -> Packed:
    """Lays out every id once: what all prompts begin with, then each prompt's rest and its samples as a tree; no padding."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []

    def lay(ids: Sequence[int], position: int, prefix: Segment | None) -> Segment:
        segments.append(Segment(len(tokens), len(ids), *((prefix.start, prefix.length) if prefix else ())))
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))
        return segments[-1]

    def lay_tree(samples: list[Sample], places: list[list[int]], depth: int, offset: int, prefix: Segment) -> None:
        """Lays the rest of samples that agree in their first `depth` ids; those that go on alike share a segment. `offset` is the position
        of their first id, after the prompt; `places[i]` collects where in the pack the ids of sample i are."""
        families: dict[tuple[int, ...], list[int]] = {}
        for i, sample in enumerate(samples):
            if len(sample.ids) > depth:
                families.setdefault(tuple(sample.ids[depth: depth + SHARED_IDS]), []).append(i)
        for family in families.values():
            members = [samples[i] for i in family]
            end = depth + _agree([member.ids[depth:] for member in members])
            segment = lay(members[0].ids[depth:end], offset + depth, prefix)
            for i in family:
                places[i].extend(range(segment.start, segment.start + segment.length))
            if len(family) > 1:
                lay_tree(members, [places[i] for i in family], end, offset, segment)

    source: list[int] = []
    targets: list[int] = []
    old: list[float] = []
    advantages: list[float] = []
    sequences: list[int] = []
    trajectory_ids: list[int] = []
    number = 0
    prompts = [group.prompt for group in groups]
    common = min(_agree(prompts), min(map(len, prompts)) - 1) if len(prompts) > 1 else 0        # each keeps an id of its own
    beginning = lay(groups[0].prompt[:common], 0, None) if common else None
    for group in groups:
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
                    advantages.append(sample.advantage[i] if isinstance(sample.advantage, list) else sample.advantage)
    as_ids = dict(dtype=torch.int64, device=device)
    as_numbers = dict(dtype=torch.float32, device=device)
    return Packed(torch.tensor(tokens, **as_ids), torch.tensor(positions, **as_ids), packed_attention(segments),
                  torch.tensor(source, **as_ids), torch.tensor(targets, **as_ids), torch.tensor(old, **as_numbers), torch.tensor(advantages, **as_numbers),
                  torch.tensor(sequences, **as_ids), torch.tensor(trajectory_ids, **as_ids))


def _agree(sequences: Sequence[Sequence[int]]) -> int:
    """How many ids all of them begin with."""
    first, last = min(sequences), max(sequences)             # in lexicographic order: what these two share, all share
    return next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))


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


def step_counts(groups: Sequence[Group], aggregation: str = "token", length: int = 1) -> tuple[float, float]:
    """The sampled ids, and the loss's normaliser (grpo.normaliser), of these groups; both add up over ranks."""
    samples = [sample for group in groups for sample in group.samples if sample.count]
    count = float(sum(sample.count for sample in samples))
    trajectories = sum(sample.count / (sample.trajectory_ids or sample.count) for sample in samples)
    return count, {"token": count, "sequence": trajectories, "constant": trajectories * length}[aggregation]


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
    """A model, its optimizer, and optionally a frozen reference. Owns no data and draws nothing at random."""

    def __init__(self, model: Qwen3, *, vocab_limit: int, optimizer: str = "adamw", betas: tuple[float, float] = (0.9, 0.95),
                 weight_decay: float = 0.0, grad_clip: float = 1.0, token_budget: int = 16384):
        self.model, self.vocab_limit = model, vocab_limit
        self.betas, self.weight_decay, self.grad_clip, self.token_budget = betas, weight_decay, grad_clip, token_budget
        self.reference: Qwen3 | lora.Base | None = None
        self.new_optimizer(optimizer)

    def new_optimizer(self, kind: str) -> None:
        """Forgets all moments. "adamw"; or "muon": Muon (Jordan 2024) for the matrices of the blocks, AdamW for everything else.

        Muon's updates are scaled to the RMS of AdamW's (Liu et al. 2025, arXiv 2502.16982), so that one learning rate serves both.
        """
        matrices = [p for p in self.model.layers.parameters() if p.dim() == 2 and p.requires_grad] if kind == "muon" else []
        taken = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in taken]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(
            [{"params": [p for p in others if p.dim() >= 2], "weight_decay": self.weight_decay},
             {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0}],
            lr=0.0, betas=self.betas, fused=True)]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, lr=0.0, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw"))
        self.optimizer_kind = kind

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def freeze_reference(self) -> None:
        """Keeps a copy of the model as it is now, for the KL term; of a model with adapters (lora.py), whose base does not change, no copy."""
        if lora.adapters(self.model):
            self.reference = lora.Base(self.model)
            return
        self.reference = copy.deepcopy(self.model).requires_grad_(False)

    def supervised_step(self, groups: Sequence[Group], learning_rate: float) -> dict[str, float]:
        """One update on demonstrations; returns the mean loss in nats per demonstrated id, the gradient norm and the tokens packed."""
        normaliser = float(sum(group.sampled for group in groups))
        metrics = {"loss": 0.0, "entropy": 0.0}
        for batch in micro_batches(groups, self.token_budget):
            packed = pack(batch, self.device)
            hidden = self.model(packed.tokens, packed.positions, packed.attend)
            logprobs, entropy = self._logprobs(hidden, packed, 1.0)
            loss = grpo.supervised_loss(logprobs, normaliser=normaliser)
            loss.backward()
            metrics["loss"] += loss.item()
            metrics["entropy"] += float(entropy.sum()) / normaliser
        return metrics | self._update(learning_rate) | {"tokens": float(sum(group.tokens for group in groups))}

    def policy_step(self, groups: Sequence[Group], learning_rate: float, *, temperature: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.28,
                    dual_clip: float | None = None, kl_coef: float = 0.0, kl: str = "full", surrogate: str = "clip", aggregation: str = "token",
                    length: int = 1, importance_cap: float | None = None) -> dict[str, float]:
        """One update. `kl`: "full" is the exact KL(policy || reference) over the vocabulary, "k2" and "k3" its estimates; the rest: grpo.py.

        With an `importance_cap` the old log-probabilities are the trainer's own, which with one update a step are the present ones, so that
        no second pass is needed; the sampler's, with other arithmetic or weights a step old, enter as the truncated weight. Without it they
        are taken for the old ones, and the clip of the ratio bounds both.
        Metrics are means over the sampled ids of the step; `logprob_gap` is mean |trainer - sampler| of the log-probabilities.
        """
        count, normaliser = step_counts(groups, aggregation, length)
        metrics: dict[str, float] = {}
        for batch in micro_batches(groups, self.token_budget):
            packed = pack(batch, self.device)
            hidden = self.model(packed.tokens, packed.positions, packed.attend)
            logprobs, entropy = self._logprobs(hidden, packed, temperature)
            weights = 1.0 / packed.trajectory_ids if aggregation == "sequence" else None
            ref_logprobs, penalty = None, None
            if kl_coef:
                if self.reference is None:
                    raise ValueError("kl_coef needs freeze_reference() before the first step")
                with torch.no_grad():
                    ref_hidden = self.reference(packed.tokens, packed.positions, packed.attend)
                if kl == "full":
                    kls = full_kl(hidden[packed.source], ref_hidden[packed.source], self.model.output_weight, self.reference.output_weight,
                                  temperature=temperature, vocab_limit=self.vocab_limit)
                    penalty = (kls if weights is None else kls * weights).sum() / normaliser
                else:
                    with torch.no_grad():
                        ref_logprobs, _ = token_logprobs(ref_hidden[packed.source], self.reference.output_weight, packed.targets,
                                                         temperature=temperature, vocab_limit=self.vocab_limit)
            old = packed.old_logprobs if importance_cap is None else logprobs.detach()
            loss, terms = grpo.policy_loss(logprobs, old, packed.advantages, normaliser=normaliser, clip_low=clip_low,
                                           clip_high=clip_high, dual_clip=dual_clip, ref_logprobs=ref_logprobs,
                                           kl_coef=0.0 if kl == "full" else kl_coef, kl_estimator="k2" if kl == "full" else kl, surrogate=surrogate,
                                           sequences=packed.sequences, weights=weights, importance_cap=importance_cap,
                                           sampler_logprobs=None if importance_cap is None else packed.old_logprobs, count=count)
            if penalty is not None:
                terms["kl"] = (kls.detach().sum() / count).item()
                loss = loss + kl_coef * penalty
            loss.backward()
            gap = (logprobs.detach() - packed.old_logprobs).abs().sum()
            terms |= {"loss": loss.item(), "entropy": float(entropy.sum()) / count, "logprob_gap": float(gap) / count}
            for name, value in terms.items():
                metrics[name] = metrics.get(name, 0.0) + value
        return metrics | self._update(learning_rate) | {"tokens": float(sum(group.tokens for group in groups))}

    def _logprobs(self, hidden: Tensor, packed: Packed, temperature: float) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden[packed.source], self.model.output_weight, packed.targets, temperature=temperature, vocab_limit=self.vocab_limit)

    def _update(self, learning_rate: float) -> dict[str, float]:
        """Clips, steps unless the gradient is not finite, clears."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm.item(), "learning_rate": learning_rate}

    def state_dict(self) -> dict[str, object]:
        """Everything a run needs to go on exactly: weights, moments, reference."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer_kind, "moments": [o.state_dict() for o in self.optimizers],
                "reference": None if self.reference is None else self.reference.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.model.load_state_dict(state["model"])
        self.new_optimizer(state["optimizer"])
        for optimizer, moments in zip(self.optimizers, state["moments"], strict=True):
            optimizer.load_state_dict(moments)
        if state["reference"] is not None:
            self.freeze_reference()
            self.reference.load_state_dict(state["reference"])
