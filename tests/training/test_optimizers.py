"""The optimizers take every parameter once, and the schedule is the stated."""

from __future__ import annotations

import pytest

from nanorchestra.training.optimizers import build_optimizers, scheduled


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_trained_parameter_has_one_optimizer(nano_model, kind):
    nano_model.embed_tokens.weight.requires_grad_(False)
    optimizers = build_optimizers(nano_model, kind, beta2=0.999, weight_decay=0.01, momentum=0.8)
    adamw = optimizers[0].param_groups[0]
    assert (adamw["betas"], adamw["weight_decay"]) == ((0.9, 0.999), 0.01)
    assert [muon.param_groups[0]["momentum"] for muon in optimizers[1:]] == [0.8] * (kind == "muon")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    taken = [id(p) for group in groups for p in group["params"]]
    trained = [p for p in nano_model.parameters() if p.requires_grad]
    assert sorted(taken) == sorted(map(id, trained))


def test_the_schedule_rises_holds_and_falls():
    rates = [scheduled(n, 1.0, 100, 10, hold=0.0) for n in (0, 9, 55, 100)]
    assert rates == pytest.approx([0.1, 1.0, 0.55, 0.1])
    held = [scheduled(n, 1.0, 100, 10, hold=0.5) for n in (9, 30, 50, 75, 100)]
    assert held == pytest.approx([1, 1, 1, 0.55, 0.1])
    assert scheduled(99, 1.0, 100, 10, hold=1.0) == 1
