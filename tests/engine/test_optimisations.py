"""Each optimisation switched off alone: the same tokens, the same gradients.

A rollout and an update are computed with all of them, then without each. A row of a table switches
one off, and names a figure that shows it. CUDA graphs and kernels are in test_gpu_runner.py and
test_by_kernels.py, ranks in test_distributed.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_engine import CONFIG, make_model
from test_look_ahead import AheadRunner
from test_updates import make_groups

from nanorchestra.config import GrpoSection, ParallelSection
from nanorchestra.engine.cpu_runner import CpuRunner
from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.model.native import PackedLinear, library, pack
from nanorchestra.model.quantise import linears
from nanorchestra.training import logprobs as head
from nanorchestra.training import packing
from nanorchestra.training.trainer import Trainer, hidden_states
from train import policy_update

C_PATH = "the C of a CPU"


@dataclass
class Sampling:
    """An engine, with all optimisations by default."""

    packed: bool = True
    runner: type[CpuRunner] = AheadRunner
    max_batch_tokens: int = 16
    max_running: int = 8
    shares_prefixes: bool = True
    keeps_sessions: bool = True

    def play(self) -> tuple[list[tuple[list[int], list[float]]], dict[str, int]]:
        """Two turns of sessions, beside a group of equal prompts and some of a common beginning.

        Returns the tokens and log-probabilities of each request, and figures of the engine.
        """
        model = make_model()
        if self.packed:
            pack(model)
        sizes = {"max_batch_tokens": self.max_batch_tokens, "max_running": self.max_running}
        engine, drawn = Engine(model, num_pages=80, **sizes), []
        engine.runner = self.runner(model, CONFIG.vocab_size, 80)
        if not self.shares_prefixes:
            engine.blocks.next_key = lambda *_: None
        prompt = [(7 * i) % 90 for i in range(70)]
        prompts = [prompt] * 3 + [prompt[:50] + [i] * 20 for i in (1, 2)] + [[3], [4] * 33]
        sessions = [engine.session(prompt[:40] + [i]) for i in range(2)]
        for turn in range(2):
            params = []
            for i in range(len(prompts) + len(sessions)):
                temperature = (1.0, 0.0, 0.7)[i % 3]
                params.append(SamplingParams(5 + i, seed=9 * turn + i, temperature=temperature))
            requests = [session.submit(params.pop()) for session in sessions]
            requests += [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
            while engine.has_work:
                engine.step()
            drawn += [(each.completion.token_ids, each.completion.logprobs) for each in requests]
            for session in sessions:
                session.append([8, 9, 10])
                if not self.keeps_sessions:
                    engine.scheduler.free(session._sequence)
        figures = {
            "packed matrices": len(linears(model, PackedLinear)),
            "steps ahead": getattr(engine.runner, "ahead", 0),
        }
        return drawn, figures | engine.stats


SAMPLING = {  # what is switched off, and the figure that shows it
    C_PATH: ({"packed": False}, "packed matrices"),
    "look-ahead": ({"runner": CpuRunner}, "steps ahead"),
    "the prefix cache": ({"shares_prefixes": False}, "prefill_tokens"),
    "the KV of a session": ({"keeps_sessions": False}, "prefill_tokens"),
    "prompts in chunks": ({"max_batch_tokens": 4096}, "steps"),
    "continuous batching": ({"max_running": 1}, "steps"),
}


@pytest.fixture(scope="module")
def with_all():
    return Sampling().play()


@pytest.mark.parametrize("optimisation", SAMPLING)
def test_without_an_optimisation_the_engine_draws_the_same(with_all, optimisation):
    """The same bits, but for the C, whose sums have another order."""
    if optimisation == C_PATH and library(torch.float32) is None:
        pytest.skip("there is no compiler")
    change, figure = SAMPLING[optimisation]
    drawn, figures = Sampling(**change).play()
    expected, figures_with_all = with_all
    assert figures[figure] != figures_with_all[figure], "it was off, or is not"
    exact = optimisation != C_PATH and library(torch.float32) is not None
    for (tokens, logprobs), (all_tokens, all_logprobs) in zip(drawn, expected, strict=True):
        assert tokens == all_tokens
        assert logprobs == pytest.approx(all_logprobs, rel=0, abs=0 if exact else 1e-4)


def gradients(
    model,
    monkeypatch,
    shared_ids: int = packing.SHARED_IDS,
    token_budget: int = 10_000,
    workspace: int = 0,
    recompute: bool = True,
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The gradients of a policy update by name, with the exact KL, and figures of it."""
    monkeypatch.setattr(packing, "SHARED_IDS", shared_ids)
    monkeypatch.setattr(head, "WORKSPACE", workspace)
    monkeypatch.setattr(head, "FULL_TILES", 64)
    parallel = ParallelSection(activation_checkpointing=recompute)
    trainer = Trainer(model, vocab_limit=690, token_budget=token_budget, parallel=parallel)
    grpo, taken = GrpoSection(kl_coef=0.5, importance_cap=2.0), {}
    trainer.begin_grpo(grpo)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)  # away from the reference

    def take() -> float:
        taken.update({name: p.grad.clone() for name, p in model.named_parameters()})
        return float("nan")  # no step

    trainer.clip_gradients = take
    groups = make_groups(1)
    policy_update(trainer, groups, grpo, 0.0, 1.0)
    batches, kept = trainer.micro_batches(groups), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        hidden = hidden_states(trainer.model, batches[0])
    figures = {
        "tokens": sum(len(batch.tokens) for batch in batches),
        "micro-batches": len(batches),
        "chunks": len(head._chunks(hidden, 690, 1)),
        "kept for backward": sum(x.numel() for x in kept if not x.is_leaf),
    }
    return taken, figures


TRAINING = {
    "packing as a tree": ({"shared_ids": 10**9}, "tokens"),
    "micro-batches of several samples": ({"token_budget": 1}, "micro-batches"),
    "chunks of the vocabulary": ({"workspace": 1 << 40}, "chunks"),
    "layers computed again in backward": ({"recompute": False}, "kept for backward"),
}


@pytest.mark.parametrize("optimisation", TRAINING)
def test_without_an_optimisation_an_update_has_the_same_gradient(
    make_nano, monkeypatch, optimisation
):
    change, figure = TRAINING[optimisation]
    expected, figures_with_all = gradients(make_nano(), monkeypatch)
    ours, figures = gradients(make_nano(), monkeypatch, **change)
    assert figures[figure] != figures_with_all[figure], "it was off, or is not"
    assert ours.keys() == expected.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], expected[name], rtol=1e-4, atol=3e-6)
