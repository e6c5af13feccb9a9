"""What is trained: the model with its optimizers and its frozen reference, on one rank or sharded.

train.py has the updates themselves; this file has the parts that they are made of.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nanorchestra.config import GrpoSection
from nanorchestra.model import lora
from nanorchestra.model.quantise import QuantisedLinear, linears
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.sharded import is_sharded
from nanorchestra.training.costs import Costs, model_flops
from nanorchestra.training.distributed import Ranks, shard_model
from nanorchestra.training.grpo import bounded_exp, kl_estimate
from nanorchestra.training.logprobs import full_kl, token_logprobs
from nanorchestra.training.optimizers import build_optimizers
from nanorchestra.training.packing import Group, MicroBatch, by_sample, divide, pack

MAX_NORM = 1.0  # of the gradient, above which it is scaled down; the preset's largest was 0.22


class Trainer:
    """A model, its optimizers, and `reference`: a frozen copy that a KL term is to, or None.

    The model is plain, or sharded by distributed.shard_model over the same `ranks`. vocab_limit:
    ids that can be sampled. token_budget: packed tokens of a micro-batch. activation_checkpointing:
    a layer's input alone is kept, and the rest computed again in backward. cpu_offload, of a
    sharded model: weights and moments are in host memory; dtype: that of computing in its
    reference. A model with adapters needs no copy: the KL term is to its base. Nothing here is
    random.
    """

    def __init__(
        self,
        model: Qwen3,
        *,
        vocab_limit: int,
        optimizer: str = "adamw",
        ranks: Ranks | None = None,
        token_budget: int = 16384,
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        dtype: torch.dtype = torch.float32,
    ):
        self.model = model
        self.vocab_limit = vocab_limit
        self.ranks = ranks or Ranks(device=model.embed_tokens.weight.device)
        self.token_budget = token_budget
        self.cpu_offload, self.dtype = cpu_offload, dtype
        self.reference: Qwen3 | None = None
        for block in model.layers:
            block.recompute = activation_checkpointing
        self.optimizers = build_optimizers(model, optimizer)

    def micro_batches(self, groups: Sequence[Group]) -> list[MicroBatch]:
        """Returns this rank's share of a step, packed: as many micro-batches as other ranks have.

        All ranks call it with the same groups.
        """
        costs = Costs.of(self.model.config)

        def flops(group):
            lengths = [len(sample.ids) - group.shared for sample in group.samples]
            pairs = group.shared**2 / 2
            for length in lengths:
                pairs += length * (group.shared + length / 2)
            return group.tokens * costs.token_flops + pairs * costs.pair_flops

        shares = divide(groups, self.ranks.world_size, self.token_budget, flops)
        return [pack(batch, self.ranks.device) for batch in shares[self.ranks.rank]]

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Returns the model's hidden states that predict the ids in the loss, [N, hidden]."""
        return _hidden(self.model, batch)

    def logprobs(
        self, hidden: Tensor, batch: MicroBatch, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities of the ids in the loss, and entropies in nats: both fp32 [N].

        hidden [N, hidden]. They are under the distribution at `temperature`, the sampler's.
        """
        return self._logprobs(hidden, self.model.output_weight, batch, temperature)

    def _logprobs(self, hidden, weight, batch, temperature) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden,
            weight,
            batch.targets,
            temperature=temperature,
            vocab_limit=self.vocab_limit,
        )

    def kl_to_reference(
        self,
        hidden: Tensor,
        trainer_logprobs: Tensor,
        batch: MicroBatch,
        kind: str,
        temperature: float = 1.0,
    ) -> Tensor:
        """Returns KL(policy || reference) at each id in the loss, fp32 [N], with its gradient.

        kind: "full", exact over the vocabulary, or "k2", an estimate from the ids.
        """
        reference = self.reference or self.model  # adapters: the model without them
        with torch.no_grad(), lora.disabled(reference):
            ref_hidden = _hidden(reference, batch)
        weight, ref_weight = self.model.output_weight, reference.output_weight
        if kind == "full":
            return full_kl(
                hidden,
                ref_hidden,
                weight,
                ref_weight,
                temperature=temperature,
                vocab_limit=self.vocab_limit,
            )
        with torch.no_grad():
            ref_logprobs, _ = self._logprobs(ref_hidden, ref_weight, batch, temperature)
        return kl_estimate(trainer_logprobs, ref_logprobs)

    @torch.no_grad()
    def score(self, groups: Sequence[Group], temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probabilities of each sample's ids in the loss, on every rank."""
        logprobs = []
        batches = self.micro_batches(groups)
        for batch in batches:
            logprobs.append(self.logprobs(self.hidden(batch), batch, temperature)[0])
        return self.gather_samples(by_sample(batches, torch.cat(logprobs).tolist()))

    def gather_samples(self, values: dict[int, list[float]]) -> list[list[float]]:
        """Returns the values of all samples in the order of their index.

        values: those of this rank's samples, by the sample's index.
        """
        everywhere = {}
        for part in self.ranks.all_gather(values):
            everywhere |= part
        return [everywhere[index] for index in sorted(everywhere)]

    def optimizer_step(self, learning_rate: float, loss: float) -> float:
        """Clips the gradients, updates the weights and clears the gradients.

        Returns the norm of the gradient before it was clipped, NaN if the step's `loss` is not
        finite. Without a finite norm weights and moments stay as they were.
        """
        if self.reference and self.ranks.mesh is not None:
            for module in (self.reference, *self.reference.layers):
                module.reshard()  # no backward has done it
        norm = self.clip_gradients() if math.isfinite(loss) else math.nan
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return norm

    def clip_gradients(self) -> float:
        """Scales the gradients down to MAX_NORM; returns their norm before that."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        return (norm.full_tensor() if is_sharded(norm) else norm).item()

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
                if not state and isinstance(optimizer, torch.optim.Muon):
                    state["momentum_buffer"] = torch.zeros_like(p)
                elif not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                    state["step"] = torch.zeros((), device=p.device)
                for key, value in state.items():
                    tensors[f"optimizer.{names[id(p)]}.{key}"] = value
        if self.reference:
            for name, p in self.reference.named_parameters():
                tensors[f"reference.{name}"] = p.detach()
        return tensors

    def begin_grpo(self, grpo: GrpoSection) -> None:
        """Replaces the optimizers by those of GRPO, without moments.

        With a KL term the weights of now are kept as its reference; adapters have their base.
        """
        self.optimizers = build_optimizers(
            self.model, grpo.optimizer, beta2=grpo.beta2, weight_decay=grpo.weight_decay
        )
        self.reference = None
        if grpo.kl_coef and not lora.adapters(self.model):
            self.reference = self._frozen_copy()

    def _frozen_copy(self) -> Qwen3:
        """Returns a frozen copy of the model, sharded as it is."""
        with torch.device("meta"):
            frozen = Qwen3(self.model.config).requires_grad_(False)
            shard_model(frozen, self.ranks, self.dtype, cpu_offload=self.cpu_offload)
        frozen.to_empty(device=self.model.norm.device)
        frozen.load_state_dict(self.model.state_dict())
        return frozen


def _hidden(model: Qwen3, batch: MicroBatch) -> Tensor:
    hidden = model(batch.tokens, batch.positions, batch.attention)  # [T, hidden]
    # The end of a shared prompt predicts an id of each sample. The backward of embedding adds their
    # gradients in one order; that of hidden[source] on several threads in any order.
    return F.embedding(batch.source, hidden)


class StepMetrics:
    """Sums over the ids of a step, kept on the device until the end of the step.

    Reading a number waits for the device, so it is done once a step, not once a micro-batch.
    """

    def __init__(self) -> None:
        self.flops = 0.0  # of this rank
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, name: str, values: Tensor) -> None:
        """Adds the sum of values [N], or a single value, in float64."""
        total = values.detach().sum(dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    @torch.no_grad()
    def add_largest(self, name: str, values: Tensor) -> None:
        """Keeps the largest of values [N] so far, at least 0."""
        largest = values.detach().max().double() if len(values) else values.new_zeros(()).double()
        if name in self._largest:
            largest = torch.maximum(largest, self._largest[name])
        self._largest[name] = largest

    @torch.no_grad()
    def add_mismatch(self, sampler_logprobs: Tensor, trainer_logprobs: Tensor) -> None:
        """Adds how sampler and trainer differ at the ids in the loss, both [N].

        mismatch_kl      log sampler - log trainer, whose mean estimates KL(sampler || trainer)
        logprob_gap      its size; logprob_gap_max, the largest
        mismatch_ratio   trainer / sampler; mismatch_ratio_max, the largest
        """
        mismatch = sampler_logprobs - trainer_logprobs
        ratio = bounded_exp(-mismatch)
        self.add("mismatch_kl", mismatch)
        self.add("logprob_gap", mismatch.abs())
        self.add("mismatch_ratio", ratio)
        self.add_largest("logprob_gap_max", mismatch.abs())
        self.add_largest("mismatch_ratio_max", ratio)

    def read(self, ranks: Ranks, count: int) -> dict[str, float]:
        """Returns the sums over the micro-batches of all ranks, divided by `count`.

        The largest values are as they are, FLOPs are a sum.
        """
        names = [*self._sums, *self._largest]
        values = torch.stack([*self._sums.values(), *self._largest.values()]).tolist()
        own = dict(zip(names, values, strict=True)) | {"flops": self.flops}
        every_rank = ranks.all_gather(own)
        metrics = {name: sum(part[name] for part in every_rank) / count for name in self._sums}
        for name in self._largest:
            metrics[name] = max(part[name] for part in every_rank)
        metrics["flops"] = sum(part["flops"] for part in every_rank)
        return metrics


def merge_updates(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the metrics of a step from those of its updates; {} without an update.

    FLOPs and tokens are sums, names that end in _max are the largest, and the others are means.
    Updates that were skipped count in none of these but `skipped`, their share.
    """
    made = [update for update in updates if not update["skipped"]] or updates
    merged = {}
    for name in made[0] if made else ():
        values = [update[name] for update in made]
        if name in ("flops", "tokens"):
            merged[name] = sum(update[name] for update in updates)
        elif name == "skipped":
            merged[name] = sum(update[name] for update in updates) / len(updates)
        elif name.endswith("_max"):
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged
