"""What is trained: the model with its optimizers and its frozen reference, on one rank or sharded.

train.py has the updates themselves; this file has the parts that they are made of.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from nanorchestra.config import GrpoSection, ParallelSection
from nanorchestra.model import lora
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.sharded import is_sharded
from nanorchestra.training.costs import Costs, model_flops
from nanorchestra.training.distributed import Ranks, shard_model
from nanorchestra.training.grpo import bounded_exp
from nanorchestra.training.logprobs import token_logprobs
from nanorchestra.training.optimizers import build_optimizers
from nanorchestra.training.packing import Group, MicroBatch, divide, pack, samples_in

PLAIN = ParallelSection()  # layers are kept, and all is on one device
MAX_NORM = 1.0  # of the gradient, above which it is scaled down


class UpdateMetrics:
    """Sums over the ids of an update, kept on the device until its end.

    Reading a number waits for the device, so it is done once an update, not once a micro-batch.
    loss_ids: how many ids are in the loss, on all ranks.
    """

    def __init__(self, loss_ids: int):
        self.loss_ids = loss_ids
        self.flops = 0.0  # of this rank
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, **values: Tensor) -> None:
        """Adds the sums of values [N], or single values, by name, in float64."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    @torch.no_grad()
    def add_mismatch(self, sampler_logprobs: Tensor, trainer_logprobs: Tensor) -> None:
        """Adds how sampler and trainer differ at the ids in the loss, both [N].

        mismatch_kl      log sampler - log trainer, whose mean estimates KL(sampler || trainer)
        logprob_gap      its size; logprob_gap_max, the largest
        mismatch_ratio   trainer / sampler; mismatch_ratio_max, the largest
        """
        mismatch = sampler_logprobs - trainer_logprobs
        gap, ratio = mismatch.abs(), bounded_exp(-mismatch)
        self.add(mismatch_kl=mismatch, logprob_gap=gap, mismatch_ratio=ratio)
        for name, values in (("logprob_gap_max", gap), ("mismatch_ratio_max", ratio)):
            largest = (values.max() if len(values) else values.new_zeros(())).double()
            if name in self._largest:
                largest = torch.maximum(largest, self._largest[name])
            self._largest[name] = largest

    def read(self, ranks: Ranks) -> dict[str, float]:
        """Returns the means over the ids of all ranks; of FLOPs the sum, of `_max` the largest."""
        names = [*self._sums, *self._largest]
        values = torch.stack([*self._sums.values(), *self._largest.values()]).tolist()
        own = dict(zip(names, values, strict=True)) | {"flops": self.flops}
        every_rank = ranks.all_gather(own)
        metrics = {}
        for name in self._sums:
            metrics[name] = sum(part[name] for part in every_rank) / self.loss_ids
        for name in self._largest:
            metrics[name] = max(part[name] for part in every_rank)
        metrics["flops"] = sum(part["flops"] for part in every_rank)
        return metrics


def hidden_states(model: Qwen3, batch: MicroBatch) -> Tensor:
    """Returns a model's hidden states that predict the ids in the loss, [N, hidden]."""
    hidden = model(batch.tokens, batch.positions, batch.attention)  # [T, hidden]
    # The end of a shared prompt predicts an id of each sample. The backward of embedding adds their
    # gradients in one order; that of hidden[source] on several threads in any order.
    return F.embedding(batch.source, hidden)


class Trainer:
    """A model with its optimizers. Nothing here is random.

    `optimizer` is that of the warm start; `begin_grpo` takes that of GRPO in its place.
    The model is plain, or sharded by distributed.shard_model over the same `ranks`. vocab_limit:
    ids that can be sampled. token_budget: packed tokens of a micro-batch. parallel: whether layers
    are computed again in backward, and whether a sharded model lies in host memory. dtype: that of
    computing in a sharded reference.

    reference: the frozen copy of the weights that the KL term of GRPO is to. None without the term,
    and for a model with adapters, whose frozen base the term is to.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        vocab_limit: int,
        optimizer: str = "adamw",
        ranks: Ranks | None = None,
        token_budget: int = 16384,
        parallel: ParallelSection = PLAIN,
        dtype: torch.dtype = torch.float32,
    ):
        self.model, self.vocab_limit = model, vocab_limit
        self.ranks = ranks or Ranks(device=model.embed_tokens.weight.device)
        self.token_budget, self.parallel, self.dtype = token_budget, parallel, dtype
        self.reference: Qwen3 | None = None
        for block in model.layers:
            block.recompute = parallel.activation_checkpointing
        self.optimizers = build_optimizers(model, optimizer)

    def begin_grpo(self, grpo: GrpoSection) -> None:
        """Takes the optimizers of GRPO, without moments; keeps the weights of now as reference."""
        self.optimizers = build_optimizers(
            self.model,
            grpo.optimizer,
            beta2=grpo.beta2,
            weight_decay=grpo.weight_decay,
            momentum=grpo.momentum,
        )
        self.reference = None
        if grpo.kl_coef and not lora.adapters(self.model):
            self.reference = self._frozen_copy()

    def _frozen_copy(self) -> Qwen3:
        """Returns a frozen copy of the model, sharded as it is."""
        with torch.device("meta"):
            frozen = Qwen3(self.model.config).requires_grad_(False)
            offload = self.parallel.cpu_offload
            shard_model(frozen, self.ranks, self.dtype, cpu_offload=offload)
        frozen.to_empty(device=self.model.norm.device)
        frozen.load_state_dict(self.model.state_dict())
        return frozen

    # An update: micro-batches, log-probabilities, KL, step.

    def micro_batches(self, groups: Sequence[Group]) -> list[MicroBatch]:
        """Returns this rank's share of an update, packed: as many micro-batches as others have.

        All ranks call it with the same groups.
        """
        costs = Costs.of(self.model.config)

        def cost(group):
            """Returns the FLOPs of a group's forward pass, as `divide` estimates its packing."""
            lengths = [len(sample.ids) - group.shared for sample in group.samples]
            pairs = group.shared**2 / 2
            for length in lengths:
                pairs += length * (group.shared + length / 2)
            return group.tokens * costs.token_flops + pairs * costs.pair_flops

        shares = divide(groups, self.ranks.world_size, self.token_budget, cost)
        return [pack(batch, self.ranks.device) for batch in shares[self.ranks.rank]]

    def logprobs(
        self,
        batch: MicroBatch,
        temperature: float = 1.0,
        kl: Literal["full", "k2"] | None = None,
        min_entropy: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns log-probabilities, entropies in nats and KL of the ids in the loss: fp32 [N].

        They are under the distribution at `temperature`, the sampler's. kl is that of the policy
        from the reference: "full", exact over the vocabulary, or "k2" (Schulman 2020), half the
        squared log-ratio at the ids, an estimate whose gradient on policy is that of the KL; None
        without it. Gradients flow from log-probabilities and KL, of ids whose entropy is at least
        min_entropy alone; the KL of the others is not computed, and 0.
        """
        head = partial(token_logprobs, temperature=temperature, vocab_limit=self.vocab_limit)
        hidden, weight = hidden_states(self.model, batch), self.model.output_weight
        frozen = self._frozen_states(batch) if kl else None
        if not min_entropy:
            return _with_kl(head, (hidden, weight), batch.targets, frozen, kl)
        with torch.no_grad():
            logprobs, entropy, _ = head(hidden, weight, batch.targets)
        chosen = (entropy >= min_entropy).nonzero()[:, 0]
        if frozen:
            frozen = frozen[0][chosen], frozen[1]
        policy, targets = (hidden[chosen], weight), batch.targets[chosen]
        learnt, _, divergence = _with_kl(head, policy, targets, frozen, kl)
        if divergence is not None:
            divergence = torch.zeros_like(logprobs).index_copy(0, chosen, divergence)
        return logprobs.index_copy(0, chosen, learnt), entropy, divergence

    @torch.no_grad()
    def _frozen_states(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns what `_with_kl` takes of the reference: its hidden states and output matrix."""
        reference = self.model if self.reference is None else self.reference
        with lora.disabled(reference):  # a model with adapters is then its base
            return hidden_states(reference, batch), reference.output_weight

    def optimizer_step(self, learning_rate: float, *, finite: bool) -> dict[str, float]:
        """Clips the gradients, updates the weights and clears the gradients.

        finite: whether the loss is. Returns metrics: `grad_norm` is that before clipping. `skipped`
        is 1 if the loss or the norm is not finite: weights and moments then stay as they were.
        """
        self._reshard_reference()
        norm = self.clip_gradients() if finite else math.nan
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for settings in optimizer.param_groups:
                    settings["lr"] = learning_rate
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return {
            "grad_norm": norm,
            "skipped": float(not math.isfinite(norm)),
            "learning_rate": learning_rate,
        }

    def _reshard_reference(self) -> None:
        """Frees the gathered weights of a sharded reference; a backward of its own would do it.

        Not sooner: the backward of the KL reads its output matrix.
        """
        if self.reference is not None and self.ranks.mesh is not None:
            for module in (self.reference, *self.reference.layers):
                module.reshard()

    def clip_gradients(self) -> float:
        """Scales the gradients down to MAX_NORM; returns their norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        return (norm.full_tensor() if is_sharded(norm) else norm).item()

    # Before several updates.

    @torch.no_grad()
    def compute_first_logprobs(self, groups: Sequence[Group], temperature: float) -> None:
        """Computes first_logprobs of every sample in the groups, which all ranks then have.

        All ranks call it with the same groups; each computes its share.
        """
        samples = samples_in(groups)
        numbers = {id(sample): number for number, sample in enumerate(samples)}
        computed = {}  # by the number of the sample
        for batch in self.micro_batches(groups):
            logprobs, _, _ = self.logprobs(batch, temperature)  # [N]
            lengths = [sample.loss_ids for sample in batch.samples]
            for sample, own in zip(batch.samples, logprobs.cpu().split(lengths), strict=True):
                computed[numbers[id(sample)]] = own.tolist()
        for part in self.ranks.all_gather(computed):
            for number, first_logprobs in part.items():
                samples[number].first_logprobs = first_logprobs

    # What the trainer holds and computes.

    def parameters(self) -> int:
        """Returns how many numbers the model has, those in 4 bits and of adapters included."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        for _, module in linears(self.model, QuantisedLinear):
            count += module.in_features * module.out_features
        return count

    def flops(self, batch: MicroBatch, *, reference: bool = False) -> float:
        """Returns the FLOPs of forward and backward, and of a forward pass of the reference."""
        return model_flops(
            self.model.config,
            len(batch.tokens),
            batch.pairs,
            len(batch.targets),
            adapters=bool(lora.adapters(self.model)),
            reference=reference,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Returns weights, moments and reference by name; writing to them writes to the trainer.

        Moments that no step has made yet are made.
        """
        self._make_moments()
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for optimizer in self.optimizers:
            for p in optimizer.param_groups[0]["params"]:
                for key, value in optimizer.state[p].items():
                    tensors[f"optimizer.{names[id(p)]}.{key}"] = value
        if self.reference is not None:
            for name, p in self.reference.named_parameters():
                tensors[f"reference.{name}"] = p.detach()
        return tensors

    def _make_moments(self) -> None:
        """Makes the moments that an optimizer lacks, as its first step would: zero."""
        for optimizer in self.optimizers:
            for p in optimizer.param_groups[0]["params"]:
                state = optimizer.state[p]
                if not state and isinstance(optimizer, torch.optim.Muon):
                    state["momentum_buffer"] = torch.zeros_like(p)
                elif not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["step"] = torch.zeros((), device=p.device)


def _with_kl(
    head: Callable[..., tuple[Tensor, Tensor, Tensor | None]],
    policy: tuple[Tensor, Tensor],
    targets: Tensor,
    reference: tuple[Tensor, Tensor] | None,
    kl: Literal["full", "k2"] | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns log-probabilities, entropies and KL of given states, as `Trainer.logprobs` does.

    head: token_logprobs with its options. policy and reference: hidden states [N, hidden] and the
    output matrix.
    """
    if kl != "k2":
        return head(*policy, targets, reference=reference)
    with torch.no_grad():
        ref_logprobs, _, _ = head(*reference, targets)
    logprobs, entropy, _ = head(*policy, targets)
    return logprobs, entropy, (logprobs - ref_logprobs).square() / 2


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the metrics of a step from those of its updates, at least one.

    FLOPs are a sum, names that end in _max are the largest, and the others are means.
    Updates that were skipped count in none of these but `skipped`, their share.
    """
    made = [update for update in updates if not update["skipped"]] or updates
    merged = {}
    for name in made[0]:
        values = [update[name] for update in made]
        if name == "flops":
            merged[name] = sum(update[name] for update in updates)
        elif name == "skipped":
            merged[name] = sum(update[name] for update in updates) / len(updates)
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged
