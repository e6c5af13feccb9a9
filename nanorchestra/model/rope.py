"""Rotary positions: the angles of every kind of model that the decoder computes.

RoPE turns pair i of a head by position * theta^(-2i/D), i < D/2 (Su et al. 2021, arXiv 2104.09864,
section 3.2.2). The paper's pair i is x[2i] and x[2i + 1]. Here it is x[i] and x[i + D/2], the
layout of GPT-NeoX and Hugging Face. A model that was extended to longer texts scales these
frequencies: "llama3" and "yarn" are two published ways. `Rotation` holds the cosines and sines of
one step.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones stay.

    What counts is how often a pair turns within original_max_position_embeddings tokens. A
    frequency of fewer than low_freq_factor turns is low, one of more than high_freq_factor turns is
    high. Between the two, the mean of both results is weighted by the number of turns (reference
    code of Llama 3.1, `apply_scaling`).
    """

    rope_type: ClassVar[str] = "llama3"
    attention_factor: ClassVar[float] = 1.0

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Returns the scaled frequencies, fp32 [D / 2]: those of `theta` are given."""
        wavelengths = 2 * math.pi / frequencies  # tokens of one turn
        turns = self.original_max_position_embeddings / wavelengths
        range_of_turns = self.high_freq_factor - self.low_freq_factor
        kept = (turns - self.low_freq_factor) / range_of_turns  # share of the original frequency
        between = (1 - kept) * frequencies / self.factor + kept * frequencies
        scaled = torch.where(kept > 1, frequencies, between)
        return torch.where(kept < 0, frequencies / self.factor, scaled)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): how Qwen3 reaches 131,072 tokens.

    Pairs that turn less than beta_slow times within the original length are divided by `factor`
    (section 3.2, "NTK-by-parts"); those that turn more than beta_fast times stay; a ramp lies
    between. Cosines and sines are multiplied by attention_factor (section 3.4), and so scores by
    its square. truncate: whether the ramp begins and ends at whole pairs.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Returns the scaled frequencies, fp32 [D / 2]: those of `theta` are given."""
        pairs = len(frequencies)
        first = self._pair_with_turns(self.beta_fast, pairs, theta)
        last = self._pair_with_turns(self.beta_slow, pairs, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        if first == last:
            last += 0.001  # a step in place of a ramp
        pair = torch.arange(pairs, dtype=torch.float32, device=frequencies.device)
        ramp = (pair - first) / (last - first)
        kept = 1 - ramp.clamp(0, 1)  # share of the original frequency
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _pair_with_turns(self, turns, pairs, theta) -> float:
        """Returns the pair, as a real number, that turns so often within the original length."""
        length = self.original_max_position_embeddings
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)


RopeScaling = Llama3Scaling | YarnScaling


def yarn_attention_factor(factor: float) -> float:
    """Returns YaRN's factor of cosines and sines: 0.1 ln(factor) + 1 (equation 22 of the paper)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@cache
def scaled_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Returns the rotary angle per position of each pair, fp32 [head_dim / 2] on `device`.

    They are computed on the CPU, so that all devices have the same bits.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is not None:
        frequencies = scaling.scaled(frequencies, theta)
    return frequencies.to(device)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Cosines and sines of the positions of T tokens, [T, D / 2]: fp32 in every precision.

    As bare tensors among a layer's inputs they would be cast by FSDP's mixed precision, which does
    not look into this class.
    """

    cos: Tensor
    sin: Tensor
