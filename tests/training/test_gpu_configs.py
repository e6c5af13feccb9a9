"""A GPU config of each kind trains in small as on a GPU: kernels, FSDP2, bf16, checkpointing.

Where there is no GPU the kernels run in Triton's interpreter and the one rank is gloo's. The step
is that of benchmarks/gpu.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.gpu_parts import Part, training
from nanorchestra.model.sharded import is_sharded
from nanorchestra.training import build

# Log-probabilities of trainer and sampler: their mean and largest distance in nats. The logits of
# this model have unit variance, and an error in one layer makes a distance of 0.1 or more.
GAP, LARGEST_GAP = 0.02, 0.1
CASES = [
    ("qwen3-8b", {"grpo.kl_coef": 1e-3, "grpo.optimizer": "muon"}),  # KL to a sharded copy
    ("qwen3-8b-lora", {"grpo.kl_coef": 1e-3}),  # KL to the base
    ("qwen3-8b", {"rollout.weights": "int8"}),
    ("qwen3-8b-qlora", {}),  # one process: its base in 4 bits is not sharded
]


@pytest.mark.slow
@pytest.mark.parametrize("name, changes", CASES, ids=str)
def test_a_gpu_config_trains_in_small(monkeypatch, name, changes):
    models, shard = [], build.shard_model

    def sharding(*args, **options):
        models.append(shard(*args, **options))
        return models[-1]

    monkeypatch.setattr(training, "STEPS", 1)
    monkeypatch.setattr(training, "SMALL", replace(training.SMALL, num_hidden_layers=1))
    monkeypatch.setattr(build, "shard_model", sharding)
    part = Part(rehearse=True)
    training.grpo_step(part, name, **changes)
    agreement = part.figures["agreement"]
    assert 0 < agreement["logprob_gap"] < GAP and agreement["most"] < LARGEST_GAP
    trained = [p for p in models[0].parameters() if p.requires_grad]
    assert trained and all(is_sharded(p) == (name != "qwen3-8b-qlora") for p in trained)
