"""Packs trajectories without padding, and divides them into micro-batches and over ranks.

A pack is a tree of shared prefixes. The text that all prompts of a world begin with stands in it
once, each prompt once, and whatever the samples of a group begin with in common once.
`PackedAttention` lets each id attend to its own past, so the gradients are exactly those of
the whole sequences. Nothing here computes with a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from os.path import commonprefix  # of any lists, not of paths alone

import torch
from torch import Tensor

from nanorchestra.model.attention import PackedAttention, Segment

SHARED_IDS = 16  # a shared prefix shorter than this costs more as a segment than it saves


@dataclass
class Sample:
    """The ids of one attempt, or of one turn of an attempt, its prompt included.

    `sampled` and `logprobs` have one entry per id: whether the policy sampled it, and the sampler's
    log-probability. `old_logprobs` are the trainer's before the step, one per sampled id, if it has
    computed them. `trajectory_ids` counts the sampled ids of the whole attempt if the attempt is
    divided over several samples; the loss then still weighs attempts, not samples.
    """

    ids: list[int]
    sampled: list[bool]
    logprobs: list[float]
    advantage: float = 0.0
    trajectory_ids: int | None = None
    old_logprobs: list[float] | None = None

    @property
    def count(self) -> int:
        """How many of the ids are sampled."""
        return sum(self.sampled)


@dataclass
class Group:
    """The samples of a task. They begin with the same `shared` ids: what their prompts share."""

    samples: list[Sample]
    shared: int

    @property
    def tokens(self) -> int:
        """How many ids the samples have, the shared ones counted once."""
        return self.shared + sum(len(sample.ids) - self.shared for sample in self.samples)


def samples_in(groups: Sequence[Group]) -> list[Sample]:
    """Returns the samples of all groups, in their order."""
    return [sample for group in groups for sample in group.samples]


@dataclass
class Packed:
    """One micro-batch of T packed ids, N of them sampled; all tensors on one device.

    tokens, positions: int64 [T]; `attention` knows the segments. `pairs` counts the pairs of an
    id and an id it attends to, itself included.
    One entry per sampled id [N]: source int64 (index in tokens whose hidden state predicts it),
    targets int64, sequences int64 (number of its sample), trajectory_ids int64 (sampled ids of its
    trajectory), sampler_logprobs, old_logprobs (the sampler's where the sample has none) and
    advantages float32; reference [N, H] in the model's dtype, the hidden states of the reference
    that predict the ids, if they are known.
    """

    tokens: Tensor
    positions: Tensor
    attention: PackedAttention
    pairs: int
    source: Tensor
    targets: Tensor
    sequences: Tensor
    trajectory_ids: Tensor
    sampler_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    reference: Tensor | None = None


MicroBatch = tuple[list[Group], Packed, bool]  # the bool: whether it is the rank's last of a step


def pack(
    groups: Sequence[Group], device: torch.device | str = "cpu", attention: str = "triton"
) -> Packed:
    """Returns the groups as one pack. `attention` names the kernel of PackedAttention.

    Without groups the pack is one id that predicts nothing, for a rank that has no work but must
    take part in forward and backward.
    """
    samples = samples_in(groups)
    tokens, positions, segments, places = _layout([sample.ids for sample in samples] or [[0]])
    integers = []  # source, target, sequence, trajectory_ids
    floats = []  # log-probabilities, advantage
    for number, sample in enumerate(samples):
        total = sample.trajectory_ids or sample.count
        old = iter(sample.old_logprobs or ())
        for i, token in enumerate(sample.ids):
            if sample.sampled[i]:
                integers.append((places[number][i - 1], token, number, total))
                drawn = sample.logprobs[i]
                floats.append((drawn, next(old, drawn), sample.advantage))
    return Packed(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        PackedAttention(segments, attention),
        sum(positions) + len(positions),
        *torch.tensor(integers, dtype=torch.int64, device=device).reshape(-1, 4).T.contiguous(),
        *torch.tensor(floats, device=device).reshape(-1, 3).T.contiguous(),
    )


def _layout(
    sequences: list[list[int]],
) -> tuple[list[int], list[int], list[Segment], list[list[int]]]:
    """Lays sequences as a tree; returns ids, positions, segments and places.

    A segment attends to its prefix, an earlier segment. places[i] are the indices in the pack of
    the ids of sequence i.
    """
    tokens, positions, segments = [], [], []
    places = [[] for _ in sequences]

    def lay(members, depth, prefix):
        """Lays what follows the first `depth` ids of sequences that agree in these, by number."""
        branches = {}  # by the next SHARED_IDS ids
        for i in members:
            if following := sequences[i][depth : depth + SHARED_IDS]:
                branches.setdefault(tuple(following), []).append(i)
        for branch in branches.values():
            ids = commonprefix([sequences[i] for i in branch])[depth:]
            own = len(tokens), len(ids)
            segments.append(Segment(*own, *prefix))
            for i in branch:
                places[i].extend(range(len(tokens), len(tokens) + len(ids)))
            tokens.extend(ids)
            positions.extend(range(depth, depth + len(ids)))
            if len(branch) > 1:
                lay(branch, depth + len(ids), own)

    lay(range(len(sequences)), 0, ())
    return tokens, positions, segments, places


def mini_batches(groups: Sequence[Group], size: int) -> list[list[Group]]:
    """Deals the samples out in turn to as few parts as have at most `size` each; 0: one part."""
    count = -(-sum(len(group.samples) for group in groups) // size) if size else 1
    parts = [[Group([], group.shared) for group in groups] for _ in range(count)]
    turns = cycle(parts)
    for i, group in enumerate(groups):
        for sample in group.samples:
            next(turns)[i].samples.append(sample)
    return [[group for group in part if group.samples] for part in parts]


def divide(
    groups: Sequence[Group], ranks: int, token_budget: int, cost: Callable[[Group], float]
) -> list[list[list[Group]]]:
    """Returns the micro-batches of each rank, equally many for all; the last may be empty.

    Greedy assignment: the largest group first, to the least-loaded rank (Graham 1969: at most 4/3
    of the optimum). Then each rank fills micro-batches up to `token_budget` in order. A group above
    the budget, or above a rank's fair share of the cost, is halved down to single samples: the
    gradient is a sum over samples, so that does not change it.
    """
    fair = sum(map(cost, groups)) / ranks
    pieces = [piece for group in groups for piece in _halves(group, token_budget, fair, cost)]
    owners, loads = [0] * len(pieces), [0.0] * ranks
    for i in sorted(range(len(pieces)), key=lambda i: -cost(pieces[i])):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += cost(pieces[i])
    batches = [[] for _ in range(ranks)]
    rooms = [0] * ranks  # in the last micro-batch of each rank
    for piece, rank in zip(pieces, owners, strict=True):
        if piece.tokens > rooms[rank]:
            batches[rank].append([])
            rooms[rank] = token_budget
        batches[rank][-1].append(piece)
        rooms[rank] -= piece.tokens
    most = max(map(len, batches))
    return [own + [[]] * (most - len(own)) for own in batches]


def _halves(group, budget, fair, cost) -> list[Group]:
    small = group.tokens <= budget and cost(group) <= fair
    if small or len(group.samples) == 1:
        return [group]
    half = len(group.samples) // 2
    halves = (Group(part, group.shared) for part in (group.samples[:half], group.samples[half:]))
    return [piece for part in halves for piece in _halves(part, budget, fair, cost)]
