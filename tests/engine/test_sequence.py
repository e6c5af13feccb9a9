"""The door: which parameters and prompts are taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nanorchestra.engine.sequence import Limits, SamplingParams
from nanorchestra.errors import UserError


def test_bad_sampling_parameters_are_refused():
    for field, value in {
        "temperature": math.nan,
        "top_p": 0,
        "top_k": -1,
        "max_tokens": None,
        "seed": 1.0,
        "top_logprobs": 21,
    }.items():
        with pytest.raises(
            UserError, match=f"^sampling parameters: {field} is .*, it should be .+"
        ):
            SamplingParams(**{field: value})


def test_prompts_are_integers_of_the_vocabulary_that_fit_context_and_pool():
    limits = Limits(vocab_size=97, context=64, pool=48)
    for ids in ([1, 2, 3], range(1, 4), np.array([1, 2, 3]), torch.tensor([1, 2, 3])):
        assert limits.check_ids(ids) == [1, 2, 3]
    for ids in ([1.5], "hello", [97], [3, -1]):
        with pytest.raises(UserError, match="^prompt: .*0 to 96"):
            limits.check_ids(ids)
    limits.check_length(48, sampled=1)
    for count, sampled in ((0, 0), (65, 0), (49, 1)):
        with pytest.raises(UserError, match="^prompt: "):
            limits.check_length(count, sampled)
