"""A pack shows each id exactly its own past, and the division over ranks loses no sample."""

from __future__ import annotations

import random

import torch
from groups import grouped
from hypothesis import given, settings
from hypothesis import strategies as st

from nanorchestra.training.packing import Sample, divide, pack, samples_in

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=50)  # two kinds of id: much is shared
DRAWN = st.lists(st.tuples(IDS, st.lists(IDS, min_size=1, max_size=5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(DRAWN)
def test_every_sampled_id_is_predicted_from_exactly_its_past(drawn):
    """Attention with equal weights returns the mean of what an id sees, a name for its past."""

    def sample(ids):
        return Sample(ids, [i % 3 > 0 for i in range(len(ids))], [0.0] * len(ids))

    groups = [grouped(prompt, list(map(sample, samples))) for prompt, samples in drawn]
    packed = pack(groups)
    names = torch.randn(2, 100, 1, 8, generator=torch.Generator().manual_seed(0))
    values = names[packed.tokens, packed.positions]  # [T, 1, 8]
    seen = packed.attention.attend(torch.zeros_like(values), torch.zeros_like(values), values)
    place = 0
    for sample in samples_in(groups):
        tokens = torch.tensor(sample.ids)
        own = names[tokens, torch.arange(len(tokens))]
        for i, in_loss in enumerate(sample.loss_mask):
            if in_loss:
                torch.testing.assert_close(seen[packed.source[place]], own[:i].mean(0))
                assert packed.targets[place] == tokens[i]
                place += 1
    assert place == len(packed.targets)
    assert packed.pairs == (packed.positions + 1).sum()


def test_every_rank_gets_a_fair_share_and_equally_many_micro_batches():
    rng = random.Random(0)
    for ranks in (1, 2, 3, 4):
        for _ in range(20):
            sizes = [[rng.randint(1, 60) for _ in range(rng.choice((1, 2, 8)))] for _ in range(6)]
            groups = [
                grouped(
                    [i, 0, 0],
                    [Sample([j] * n, [True] * n, [0.0] * n) for j, n in enumerate(group)],
                )
                for i, group in enumerate(sizes)
            ]
            shares = divide(groups, ranks, 100, lambda group: group.tokens**1.2)
            assert len({len(share) for share in shares}) == 1 and len(shares) == ranks
            batches = [batch for share in shares for batch in share]
            placed = sorted(s.ids for batch in batches for g in batch for s in g.samples)
            assert placed == sorted(s.ids for g in groups for s in g.samples)
            for batch in batches:
                assert len(batch) < 2 or sum(group.tokens for group in batch) <= 100
            loads = [sum(g.tokens for batch in share for g in batch) for share in shares]
            assert max(loads) <= 1.5 * sum(loads) / ranks + 63
