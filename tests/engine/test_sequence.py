"""The door: which parameters and prompts are taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanorchestra.engine.sequence import Limits, SamplingParams
from nanorchestra.errors import UserError

LIMITS = Limits(vocab_size=97, context=64, pool=48)


@pytest.mark.parametrize(
    "field, values",
    {
        "temperature": (-0.1, math.nan, 1e39, "1"),
        "top_p": (0, 1.5),
        "top_k": (-1, 2**70, 5.0),
        "max_tokens": (0, None),
        "seed": (1.0,),
        "top_logprobs": (21, 1.0),
    }.items(),
)
def test_bad_sampling_parameters_are_refused(field, values):
    for value in values:
        with pytest.raises(
            UserError, match=f"^sampling parameters: {field} is .*, it should be .+"
        ):
            SamplingParams(**{field: value})


def test_ids_may_come_in_any_sequence_of_integers_and_in_nothing_else():
    arrays = np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), 2, 3]
    for ids in ((1, 2, 3), range(1, 4), *arrays):
        assert LIMITS.check_ids(ids) == [1, 2, 3]
    for ids in ([1.5], "hello", torch.tensor([[1, 2]])):
        with pytest.raises(UserError, match="^prompt: .* is not a sequence of token ids"):
            LIMITS.check_ids(ids)
    for ids in ([97], [3, -1], [10**30]):
        with pytest.raises(UserError, match="^prompt: token id .* should be from 0 to 96"):
            LIMITS.check_ids(ids)


def test_lengths_are_limited_by_context_and_pool():
    LIMITS.check_length(48, sampled=1)
    LIMITS.check_length(64)
    for count, sampled, says in (
        (0, 0, "it is empty"),
        (65, 0, "65 tokens, the context of 64 leaves room for 64"),
        (64, 1, "64 tokens, the context of 64 leaves room for 63"),
        (49, 1, "49 tokens do not fit the KV pool of 48 tokens"),
    ):
        with pytest.raises(UserError, match=says):
            LIMITS.check_length(count, sampled)
