"""Packs samples without padding into micro-batches, and divides these over ranks.

A pack is a tree of shared prefixes. The text that all prompts of a world begin with stands in it
once, each prompt once, and whatever the samples of a group begin with in common once.
`PackedAttention` lets each id attend to its own past, so the gradients are exactly those of
the whole sequences. Nothing here computes with a model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix  # of any lists, not of paths alone

import torch
from torch import Tensor

from nanorchestra.model.attention import PackedAttention, Segment

SHARED_IDS = 16  # a shared prefix shorter than this costs more as a segment than it saves


@dataclass
class Sample:
    """The ids of one attempt, or of one turn of an attempt, its prompt included.

    loss_mask and sampler_logprobs have one entry per id: whether the id enters the loss (the policy
    sampled it), and the log-probability under the distribution that it was drawn from.
    first_logprobs: of a step of several updates the trainer's before the first, one for each id in
    the loss (`Trainer.compute_first_logprobs`). None where a step is one update.
    """

    ids: list[int]
    loss_mask: list[bool]
    sampler_logprobs: list[float]
    advantage: float = 0.0
    first_logprobs: list[float] | None = None

    @property
    def loss_ids(self) -> int:
        """How many ids enter the loss."""
        return sum(self.loss_mask)


@dataclass
class Group:
    """The samples of a task, whose prompts begin with the same `shared` ids.

    `shared` serves to estimate what a group costs in a pack. `pack` does not read it and finds more
    that is shared: between groups, and in what was sampled.
    """

    samples: list[Sample]
    shared: int

    @property
    def tokens(self) -> int:
        """How many ids the samples have, the shared ones counted once; most packs have fewer."""
        return self.shared + sum(len(sample.ids) - self.shared for sample in self.samples)


def samples_in(groups: Sequence[Group]) -> list[Sample]:
    """Returns the samples of all groups, in their order."""
    return [sample for group in groups for sample in group.samples]


@dataclass
class MicroBatch:
    """T packed ids, of which N enter the loss; all tensors on one device.

    samples: what is packed; its ids in the loss stand in the [N] tensors one sample after another.
    tokens, positions: int64 [T]. attention: knows which ids each id attends to; `pairs` counts the
    pairs of an id and an id it attends to, itself included.

    One entry per id in the loss, [N]:
    source            int64, the place in `tokens` of the id before, whose hidden state predicts it
    targets           int64, the id itself
    advantages        float32
    sampler_logprobs  float32
    first_logprobs    float32, None where the samples have none
    """

    samples: list[Sample]
    tokens: Tensor
    positions: Tensor
    attention: PackedAttention
    pairs: int
    source: Tensor
    targets: Tensor
    advantages: Tensor
    sampler_logprobs: Tensor
    first_logprobs: Tensor | None


def pack(groups: Sequence[Group], device: torch.device | str = "cpu") -> MicroBatch:
    """Returns the groups as one micro-batch.

    Without groups the pack is one id that predicts nothing, for a rank that has no work but must
    take part in forward and backward.
    """
    samples = samples_in(groups)
    layout = _lay_as_tree([sample.ids for sample in samples] or [[0]])
    source, targets, advantages, sampler_logprobs, first_logprobs = [], [], [], [], []
    for sample, places in zip(samples, layout.places, strict=False):
        for i, token in enumerate(sample.ids):
            if sample.loss_mask[i]:  # never the first id, which nothing predicts
                source.append(places[i - 1])
                targets.append(token)
                advantages.append(sample.advantage)
                sampler_logprobs.append(sample.sampler_logprobs[i])
        first_logprobs += sample.first_logprobs or []
    # An idle rank, without samples, takes part in either kind of update.
    have_first = all(sample.first_logprobs is not None for sample in samples)

    def integers(values):
        return torch.tensor(values, dtype=torch.int64, device=device)

    def floats(values):
        return torch.tensor(values, dtype=torch.float32, device=device)

    return MicroBatch(
        samples=samples,
        tokens=integers(layout.tokens),
        positions=integers(layout.positions),
        attention=PackedAttention(layout.segments),
        pairs=sum(position + 1 for position in layout.positions),
        source=integers(source),
        targets=integers(targets),
        advantages=floats(advantages),
        sampler_logprobs=floats(sampler_logprobs),
        first_logprobs=floats(first_logprobs) if have_first else None,
    )


@dataclass
class _Layout:
    """Sequences laid as a tree: its ids, their positions, and the segments that they form.

    A segment attends to its prefix, an earlier segment. places[i] are the places in `tokens` of the
    ids of sequence i.
    """

    tokens: list[int]
    positions: list[int]
    segments: list[Segment]
    places: list[list[int]]


def _lay_as_tree(sequences: list[list[int]]) -> _Layout:
    """Lays sequences so that what some of them begin with stands once.

    [A B C], [A B D] and [A B D E], with branches of one id for the example:

        tokens     A B  C  D  E
        segments   (A B) <- (C),  (A B) <- (D) <- (E)
        places     [0 1 2], [0 1 3], [0 1 3 4]
    """
    layout = _Layout([], [], [], [[] for _ in sequences])

    def lay(members, depth, prefix):
        """Lays what follows the first `depth` ids of sequences that agree in these, by number."""
        branches = {}  # by the next SHARED_IDS ids
        for i in members:
            if following := sequences[i][depth : depth + SHARED_IDS]:
                branches.setdefault(tuple(following), []).append(i)
        for branch in branches.values():
            ids = commonprefix([sequences[i] for i in branch])[depth:]
            start = len(layout.tokens)
            layout.segments.append(Segment(start, len(ids), prefix))
            layout.tokens.extend(ids)
            layout.positions.extend(range(depth, depth + len(ids)))
            for i in branch:
                layout.places[i].extend(range(start, start + len(ids)))
            if len(branch) > 1:
                lay(branch, depth + len(ids), start)

    lay(range(len(sequences)), 0, None)
    return layout


def mini_batches(groups: Sequence[Group], size: int) -> list[list[Group]]:
    """Divides the samples of a step over updates of at most `size` samples; 0: one update.

    Samples are dealt out in turn, so that every update has samples of nearly all groups.
    """
    total = len(samples_in(groups))
    updates = -(-total // size) if size else 1
    parts: list[list[Group]] = [[] for _ in range(updates)]
    dealt = 0
    for group in groups:
        shares: list[list[Sample]] = [[] for _ in range(updates)]
        for sample in group.samples:
            shares[dealt % updates].append(sample)
            dealt += 1
        for part, samples in zip(parts, shares, strict=True):
            if samples:
                part.append(Group(samples, group.shared))
    return parts


def divide(
    groups: Sequence[Group], ranks: int, token_budget: int, cost: Callable[[Group], float]
) -> list[list[list[Group]]]:
    """Returns the micro-batches of each rank, equally many for all; the last may be empty.

    Greedy assignment: the largest group first, to the least-loaded rank (Graham 1969: at most 4/3
    of the optimum). Then each rank fills micro-batches in order, up to `token_budget` by
    `Group.tokens`. A group above the budget, or above a rank's fair share of the cost, is halved
    down to single samples: the gradient is a sum over samples, so that does not change it.
    """
    fair_share = sum(map(cost, groups)) / ranks
    pieces = []
    for group in groups:
        pieces += _halved(group, token_budget, fair_share, cost)
    costs = [cost(piece) for piece in pieces]

    owner = [0] * len(pieces)
    load = [0.0] * ranks
    for i in sorted(range(len(pieces)), key=lambda i: -costs[i]):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]

    batches: list[list[list[Group]]] = [[] for _ in range(ranks)]
    room = [0] * ranks  # tokens left in the last micro-batch of each rank
    for piece, rank in zip(pieces, owner, strict=True):
        if piece.tokens > room[rank]:
            batches[rank].append([])
            room[rank] = token_budget
        batches[rank][-1].append(piece)
        room[rank] -= piece.tokens
    most = max(map(len, batches))
    return [own + [[]] * (most - len(own)) for own in batches]


def _halved(group, budget, fair_share, cost) -> list[Group]:
    fits = group.tokens <= budget and cost(group) <= fair_share
    if fits or len(group.samples) == 1:
        return [group]
    half = len(group.samples) // 2
    pieces = []
    for samples in (group.samples[:half], group.samples[half:]):
        pieces += _halved(Group(samples, group.shared), budget, fair_share, cost)
    return pieces
