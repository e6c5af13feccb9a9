"""One update of the model: from groups of samples to new weights.

All ranks call a step with the same groups. Each rank computes a share of equal cost, in as many
micro-batches as every other rank. The loss is divided by a number of the whole step, so neither
packing nor micro-batches nor ranks change the gradient.
"""

import math
from collections import ChainMap, Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from nanorchestra.model import lora
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.sharded import is_sharded
from nanorchestra.training.costs import Costs, model_flops
from nanorchestra.training.logprobs import full_kl, token_logprobs
from nanorchestra.training.objectives import Objective, kl_estimate, loss_normaliser, policy_loss
from nanorchestra.training.optimizers import Muon, build_optimizers
from nanorchestra.training.packing import Group, MicroBatch, divide, pack, samples_in
from nanorchestra.training.ranks import Ranks, shard_model

MAX_NORM = 1.0  # gradients above are scaled down to it


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of a Trainer: its micro-batches, and what it keeps where."""

    token_budget: int = 16384  # packed tokens of a micro-batch
    activation_checkpointing: bool = False  # keep a layer's input only, recompute it in backward
    cpu_offload: bool = False  # of a sharded model: weights and moments in host memory
    dtype: torch.dtype = torch.float32  # of computing, in a sharded reference
    attention: str = "triton"  # kernel of PackedAttention on a GPU


@dataclass(frozen=True)
class StepResult:
    """What a policy step returns, besides its update.

    metrics: means over the sampled ids of all ranks. logprobs: of each sample, in the order of the
    groups, the trainer's log-probabilities of its sampled ids before the update.
    """

    metrics: dict[str, float]
    logprobs: list[list[float]]


class Trainer:
    """A model, its optimizer and an optional frozen reference, on one rank or sharded over many.

    The model is plain, or sharded by ranks.shard_model over the same `ranks`. `vocab_limit` is the
    number of ids that can be sampled. Nothing in a step is random.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        vocab_limit: int,
        optimizer: str = "adamw",
        ranks: Ranks | None = None,
        settings: TrainerSettings | None = None,
    ):
        self.model, self.vocab_limit = model, vocab_limit
        self.ranks = ranks or Ranks(device=model.embed_tokens.weight.device)
        self.settings = settings or TrainerSettings()
        self.reference: Qwen3 | None = None  # with LoRA the model, used without its adapters
        for block in model.layers:
            block.recompute = self.settings.activation_checkpointing
        self.optimizers = build_optimizers(model, optimizer)

    def policy_step(
        self,
        groups: Sequence[Group],
        learning_rate: float,
        objective: Objective,
        *,
        temperature: float = 1.0,
        length: int = 1,
        referred: Sequence[MicroBatch] = (),
    ) -> StepResult:
        """Updates the model by one step of an objective; returns its metrics and log-probabilities.

        temperature: that of the sampler. length: the most ids of a trajectory, for the aggregation
        "constant". referred: `refer(groups)`, if it has been computed. The old log-probabilities
        are those of the samples, if they have any. Else, with an importance cap they are those of
        this forward pass: with one update per step the two policies are the same. So they are for
        GSPO, whose bounds are narrower than the sampler's rounding. Else they are the sampler's.

        Beside the metrics of `policy_loss` and `_finish`: loss, entropy in nats, `logprob_gap` and
        `logprob_gap_max`, the mean and largest |trainer - sampler| of the log-probabilities.
        """
        count = sum(sample.count for sample in samples_in(groups))
        normaliser = loss_normaliser(groups, objective.aggregation, length)
        known = any(sample.old_logprobs for sample in samples_in(groups))
        own = not known and (objective.importance_cap or objective.surrogate == "gspo")
        metrics, computed, largest_gap = Counter(), [], 0.0
        for batch, packed, last in referred or self._micro_batches(groups):
            hidden = self._hidden(self.model, packed)
            logprobs, entropy = self._logprobs(hidden, packed, temperature)
            kl = self._kl(hidden, logprobs, packed, objective, temperature)
            if objective.min_entropy:
                forks = entropy >= objective.min_entropy
                packed = replace(packed, advantages=packed.advantages * forks)
            old = logprobs if own else packed.old_logprobs
            loss, terms = policy_loss(
                logprobs, old, packed, objective, normaliser=normaliser, kl=kl
            )
            self._backward(loss, last)

            gaps = (logprobs.detach() - packed.sampler_logprobs).abs()
            largest_gap = max(largest_gap, float(gaps.max()) if len(gaps) else 0.0)
            terms |= {"entropy": float(entropy.sum()), "logprob_gap": float(gaps.sum())}
            metrics.update({name: value / count for name, value in terms.items()})
            metrics.update(loss=loss.item(), flops=self._flops(packed, reference=kl is not None))
            computed.append((batch, logprobs.tolist()))
        metrics = self._finish(metrics, learning_rate, groups)
        metrics["logprob_gap_max"] = max(self.ranks.gather(largest_gap))
        return StepResult(metrics, self._everywhere(groups, computed))

    @torch.no_grad()
    def score(self, groups: Sequence[Group], temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probabilities as a policy step does, without an update."""
        computed = []
        for batch, packed, _ in self._micro_batches(groups):
            hidden = self._hidden(self.model, packed)
            computed.append((batch, self._logprobs(hidden, packed, temperature)[0].tolist()))
        return self._everywhere(groups, computed)

    def refer(self, groups: Sequence[Group]) -> list[MicroBatch]:
        """Returns the step's micro-batches with what the reference says of them.

        Where that is an unsharded copy of the model, it may run beside the step before.
        """
        return [
            (batch, replace(packed, reference=self._referred(packed)), last)
            for batch, packed, last in self._micro_batches(groups)
        ]

    def supervised_step(self, groups: Sequence[Group], learning_rate: float) -> dict[str, float]:
        """Updates the model by one step on demonstrations; returns its metrics.

        loss is the mean negative log-likelihood of the sampled ids, and entropy their mean
        entropy, both in nats per id.
        """
        count, metrics = sum(sample.count for sample in samples_in(groups)), Counter()
        for _, packed, last in self._micro_batches(groups):
            logprobs, entropy = self._logprobs(self._hidden(self.model, packed), packed)
            loss = -logprobs.sum() / count
            self._backward(loss, last)
            nats = float(entropy.sum()) / count
            metrics.update(loss=loss.item(), entropy=nats, flops=self._flops(packed))
        return self._finish(metrics, learning_rate, groups)

    # The parts of a step.

    def _micro_batches(self, groups) -> Iterator[MicroBatch]:
        """Yields each of this rank's micro-batches, packed."""
        costs = Costs.of(self.model.config)

        def flops(group):
            prompt = group.shared
            lengths = [len(sample.ids) - prompt for sample in group.samples]
            pairs = prompt * prompt / 2 + sum(n * (prompt + n / 2) for n in lengths)
            return group.tokens * costs.token_flops + pairs * costs.pair_flops

        ranks, budget = self.ranks, self.settings.token_budget
        batches = divide(groups, ranks.world, budget, flops)[ranks.rank]
        for i, batch in enumerate(batches, 1):
            yield batch, pack(batch, ranks.device, self.settings.attention), i == len(batches)

    def _everywhere(self, groups, computed) -> list[list[float]]:
        """Returns the log-probabilities of each sample from every rank's micro-batches."""
        numbers = {id(sample): i for i, sample in enumerate(samples_in(groups))}
        found = {}  # by number
        for batch, logprobs in computed:
            values = iter(logprobs)
            for sample in samples_in(batch):
                found[numbers[id(sample)]] = list(islice(values, sample.count))
        everywhere = ChainMap(*self.ranks.gather(found))
        return [everywhere[i] for i in range(len(numbers))]

    def _hidden(self, model, packed) -> Tensor:
        return model(packed.tokens, packed.positions, packed.attention)[packed.source]

    def _logprobs(self, hidden, packed, temperature=1.0, weight=None) -> tuple[Tensor, Tensor]:
        weight = self.model.output_weight if weight is None else weight
        return token_logprobs(
            hidden, weight, packed.targets, temperature=temperature, vocab_limit=self.vocab_limit
        )

    @torch.no_grad()
    def _referred(self, packed) -> Tensor:
        with lora.disabled(self.reference):
            return self._hidden(self.reference, packed)

    def _kl(self, hidden, logprobs, packed, objective, temperature) -> Tensor | None:
        """KL(policy || reference) per sampled id [N]: exact over the vocabulary, or an estimate."""
        if not objective.kl_coef:
            return None
        ref_hidden = self._referred(packed) if packed.reference is None else packed.reference
        weight, ref_weight = self.model.output_weight, self.reference.output_weight
        if objective.kl == "full":
            options = {"temperature": temperature, "vocab_limit": self.vocab_limit}
            return full_kl(hidden, ref_hidden, weight, ref_weight, **options)
        ref_logprobs, _ = self._logprobs(ref_hidden, packed, temperature, ref_weight)
        return kl_estimate(logprobs, ref_logprobs)

    def _backward(self, loss, last):
        """Adds to the gradients. Replicas (HSDP) all-reduce once, after the last micro-batch."""
        if self.ranks.mesh is not None:
            self.model.set_is_last_backward(last)
            self.model.set_requires_all_reduce(last)
            loss = loss * self.ranks.world  # FSDP averages over the ranks; the sum is meant
        loss.backward()

    def _flops(self, packed, reference=False) -> float:
        """Those of this step: a reference's pass beside the step before is none of them."""
        counts = len(packed.tokens), packed.pairs, len(packed.targets)
        adapters = bool(lora.adapters(self.model))
        reference = reference and packed.reference is None
        return model_flops(self.model.config, *counts, adapters=adapters, reference=reference)

    def _finish(self, metrics, learning_rate, groups) -> dict[str, float]:
        """Updates the weights, and returns the metrics of all ranks.

        Adds grad_norm before clipping, learning_rate and the packed tokens. If the loss or the
        gradient is not finite, the weights and moments stay as they were and "skipped" is 1.
        """
        parts = self.ranks.gather(metrics)
        metrics = {name: sum(part[name] for part in parts) for name in metrics}
        if self.reference not in (None, self.model) and self.ranks.mesh is not None:
            for module in (self.reference, *self.reference.layers):
                module.reshard()  # no backward has done it
        norm = self._clip_gradients() if math.isfinite(metrics["loss"]) else math.nan
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
        else:
            metrics["skipped"] = 1.0
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        tokens = float(sum(group.tokens for group in groups))
        return metrics | {"grad_norm": norm, "learning_rate": learning_rate, "tokens": tokens}

    def _clip_gradients(self) -> float:
        """Clips the gradients to MAX_NORM; returns their norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        return (norm.full_tensor() if is_sharded(norm) else norm).item()

    # State.

    def tensors(self) -> dict[str, Tensor]:
        """Returns weights, moments and reference by name; writing to them writes to the trainer.

        Moments that no step has made yet are zero, as the first step would make them.
        """
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for p in optimizer.param_groups[0]["params"]:
                state = optimizer.state[p]
                if not state and isinstance(optimizer, Muon):
                    state["momentum_buffer"] = torch.zeros_like(p)
                elif not state:
                    state |= {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                    state["step"] = torch.zeros((), device=p.device)
                tensors |= {f"optimizer.{names[id(p)]}.{key}": x for key, x in state.items()}
        if self.reference not in (None, self.model):
            frozen = self.reference.named_parameters()
            tensors |= {f"reference.{name}": p.detach() for name, p in frozen}
        return tensors

    def prepare(self, optimizer: str, reference: bool, **settings: float) -> dict[str, Tensor]:
        """Returns `tensors()` with a new optimizer (optimizers.build_optimizers) without moments.

        reference: whether the weights of now are kept for the KL term.
        """
        self.optimizers = build_optimizers(self.model, optimizer, **settings)
        self.reference = self._frozen() if reference else None
        return self.tensors()

    def _frozen(self) -> Qwen3:
        """Returns a frozen copy of the model; with LoRA the model itself, which needs no copy."""
        if lora.adapters(self.model):
            return self.model
        with torch.device("meta"):
            frozen = Qwen3(self.model.config).requires_grad_(False)
            offload = self.settings.cpu_offload
            shard_model(frozen, self.ranks, self.settings.dtype, cpu_offload=offload)
        frozen.to_empty(device=self.model.norm.device)
        frozen.load_state_dict(self.model.state_dict())
        return frozen
