"""Which rows of a GPU's step read which pages together."""

from __future__ import annotations

from nanorchestra.engine.inputs import Host, group_by_prefix

from nanorchestra.engine.scheduler import Plan
from nanorchestra.engine.sequence import Request, SamplingParams


def test_a_system_prompt_common_to_all_does_not_split_groups():
    bodies = [[1, 2, 3, *range(10 * g + 4, 10 * g + 14)] for g in range(5)]
    groups = group_by_prefix([body + [1000 + i] for body in bodies for i in range(8)])
    assert sorted((len(rows), shared) for rows, shared in groups) == [(8, 13)] * 5


def test_splits_are_shared_only_where_rows_share_pages():
    """Two rows of 600 ids in pages of 64: with the first eight pages in common, or with none."""
    for common in (8, 0):
        requests = [Request(i, [7] * 600, SamplingParams(), 700) for i in range(2)]
        for i, request in enumerate(requests):
            request.table.pages = [*range(common), *range(20 * i + 20, 20 * i + 30 - common)]
        sizes = Host(64, 16, False).fill(Plan(decodes=requests), None, False).sizes
        assert (sizes.shared, sizes.own) == ((2, 2) if common else (0, 6))
