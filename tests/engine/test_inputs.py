"""Which rows of a GPU's step read which pages together."""

from __future__ import annotations

from nanorchestra.engine.inputs import group_by_prefix


def test_a_system_prompt_common_to_all_does_not_split_groups():
    bodies = [[1, 2, 3, *range(10 * g + 4, 10 * g + 14)] for g in range(5)]
    groups = group_by_prefix([body + [1000 + i] for body in bodies for i in range(8)])
    assert sorted((len(rows), shared) for rows, shared in groups) == [(8, 13)] * 5
