"""With rebuilt context every turn is its own sample: the turns train as they would alone."""

from __future__ import annotations

import random

import torch
from scripted import ANSWER, call, play
from test_trainer import gradients

from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.trajectories import as_group


def attempts(tokenizer):
    """Two attempts of three and two turns, with log-probabilities and advantages."""
    scripts = ([call("hi"), call("ho"), ANSWER], [call("hi there"), ANSWER])
    made = [play(tokenizer, script, rebuild=True)[0][0] for script in scripts]
    rng = random.Random(0)
    for t, advantage in zip(made, (1.25, -0.5), strict=True):
        t.advantage = advantage
        t.logprobs = [rng.uniform(-7, -5) if sampled else 0.0 for sampled in t.sampled]
    return made


def test_the_gradient_of_trajectories_is_the_sum_over_their_turns(nano_model, nano_tokenizer):
    made = attempts(nano_tokenizer)
    group = as_group(made)
    total = sum(sum(t.sampled) for t in made)
    together = gradients(nano_model, [group], vocab_limit=700)
    apart = {name: torch.zeros_like(gradient) for name, gradient in together.items()}
    for t in made:
        for turn in t.turns:
            said, n = slice(turn.start, turn.end), turn.end - turn.start
            sample = Sample(t.ids[said], [True] * n, t.logprobs[said], t.advantage)
            alone = Group(t.ids[turn.context : turn.start], [sample])
            for name, gradient in gradients(nano_model, [alone], vocab_limit=700).items():
                apart[name] += gradient * n / total  # a step divides by its sampled ids
    for name in together:
        torch.testing.assert_close(together[name], apart[name], rtol=1e-4, atol=1e-6)
    assert len(group.prompt) > 100 and len(group.samples) == 5 and group.sampled == total
