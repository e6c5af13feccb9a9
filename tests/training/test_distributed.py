"""Two ranks train as one does, however the model is sharded and packed.

Run as a program, `test_distributed.py FILE`, this file is both ranks, which do the jobs in the JSON
FILE.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import test_updates
import torch
from safetensors.torch import load_file

from nanorchestra.config import GrpoSection, ParallelSection
from nanorchestra.formats.load import load_model
from nanorchestra.model import checkpoint
from nanorchestra.model.checkpoint import named_hf_tensors, save_checkpoint
from nanorchestra.model.lora import adapters, add_adapters, reset, save_adapter
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import fill, whole
from nanorchestra.training.checkpoint import Checkpoints, notes_of
from nanorchestra.training.distributed import Ranks, shard_model
from nanorchestra.training.packing import Group, mini_batches, samples_in
from nanorchestra.training.trainer import Trainer
from train import policy_update, supervised_update

VOCAB = 90
SHAPE = {  # sizes that no number of ranks divides
    "vocab_size": VOCAB,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
}
ONE = Ranks()


def make_groups(seed: int, count: int = 5) -> list[Group]:
    return test_updates.make_groups(seed, count, vocab=VOCAB - 6)


def make_model(tied: bool = True, seed: int = 0) -> Qwen3:
    model = Qwen3(ModelConfig(**SHAPE, tie_word_embeddings=tied))
    model.init_weights(seed)
    return model


def make_trainer(
    ranks: Ranks,
    tied: bool = True,
    budget: int = 300,
    offload: bool = False,
    recompute: bool = False,
    optimizer: str = "muon",
    lora: int = 0,
    dtype: str = "float32",
    seed: int = 0,
) -> Trainer:
    """`dtype` is what a sharded model computes in; adapters have learnt something already."""
    model = make_model(tied, seed)
    if lora:
        add_adapters(model.to(getattr(torch, dtype)), lora, 6.0, seed)
    model = shard_model(model, ranks, getattr(torch, dtype), cpu_offload=offload)
    for i, (_, adapter) in enumerate(adapters(model)):
        generator = torch.Generator().manual_seed(i)
        fill(adapter.lora_b, 0.1 * torch.randn(adapter.lora_b.shape, generator=generator))
    return Trainer(
        model,
        vocab_limit=VOCAB - 6,
        optimizer=optimizer,
        ranks=ranks,
        token_budget=budget,
        parallel=ParallelSection(activation_checkpointing=recompute, cpu_offload=offload),
        dtype=getattr(torch, dtype),
    )


# The jobs of a rank. Each returns tensors that are alike on all ranks.


def gradients(ranks: Ranks, kl: str = "", count: int = 5, **options) -> dict[str, torch.Tensor]:
    """The whole gradients of a policy step by name, and beside them its metrics."""
    trainer, taken = make_trainer(ranks, **options), {}
    trained = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad}

    def take() -> float:
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in trained.values())
        taken.update({name: whole(p.grad).clone() for name, p in trained.items()})
        return float("nan")  # no update

    trainer.clip_gradients = take
    objective = "toolorchestra" if kl == "k2" else "grpo"  # which has the exact KL
    grpo = GrpoSection(objective=objective, optimizer="muon", kl_coef=0.5 if kl else 0.0)
    if kl:
        trainer.begin_grpo(grpo)
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1.1)
    update = policy_update(trainer, make_groups(1, count), grpo, 0.0, 1.0)
    # not taken; a pack's shared ids are computed once in each
    for name in ("grad_norm", "skipped", "flops"):
        del update[name]
    numbers = {f"metrics.{n}": torch.tensor(x, dtype=torch.float64) for n, x in update.items()}
    return taken | numbers


def several_updates(ranks: Ranks, **options) -> dict[str, torch.Tensor]:
    """A step of grpo.mini_batch with a reference: all log-probabilities first, then the updates."""
    trainer = make_trainer(ranks, **options)
    grpo = GrpoSection(optimizer="muon", kl_coef=0.5, importance_cap=2.0, mini_batch=4)
    trainer.begin_grpo(grpo)
    values, groups = [], make_groups(0)
    trainer.compute_first_logprobs(groups, 1.0)
    for part in mini_batches(groups, grpo.mini_batch):
        update = policy_update(trainer, part, grpo, 1e-3, 1.0)
        values += [update["loss"], update["kl"], update["clip_fraction"]]
    # those of all samples, which this rank has whoever computed them
    samples = samples_in(groups)
    assert [len(sample.first_logprobs) for sample in samples] == [s.loss_ids for s in samples]
    logprobs = torch.tensor(sum([sample.first_logprobs for sample in samples], []))
    return {"losses": torch.tensor(values), "logprobs": logprobs}


def steps(ranks: Ranks, folder: str, resumed: bool = False) -> dict[str, torch.Tensor]:
    """The losses of the last two of four steps, with a checkpoint after the second; the reference.

    resumed: at that checkpoint, from other weights, which must not remain.
    """
    trainer = make_trainer(ranks, seed=5 if resumed else 0)
    trainer.begin_grpo(GrpoSection(optimizer="muon", kl_coef=0.5))
    checkpoints, done, values = Checkpoints(Path(folder), ranks), 0, []
    if resumed:
        newest = checkpoints.newest()
        checkpoints.load(newest, trainer.tensors())
        done = notes_of(newest)["step"]
    for step in range(done, 4):
        values.append(supervised_update(trainer, make_groups(step), 3e-3)["loss"])
        if step == 1:
            checkpoints.save("two", trainer.tensors(), {"step": 2})
    checkpoints.wait()
    reference = {name: value.clone() for name, value in named_hf_tensors(trainer.reference)}
    return {"losses": torch.tensor(values[-2:])} | reference


def adapted(ranks: Ranks, source: str, target: str) -> dict[str, torch.Tensor]:
    """As train.py with lora.rank: warm start, then steps with the base as the reference.

    In float64, since Adam's first step is the gradient's sign: rounding of a gradient that is
    nearly zero would move a weight by twice the learning rate.
    """

    def build(shape):
        model = Qwen3(shape)
        add_adapters(model, 3, 6.0, 0)
        return shard_model(model.double(), ranks, torch.float64)

    model, _ = load_model(source, dtype=None, build=build)
    reset(model, 1)
    trainer = Trainer(model, vocab_limit=VOCAB - 6, ranks=ranks)
    values = [supervised_update(trainer, make_groups(step), 3e-3)["loss"] for step in range(2)]
    grpo = GrpoSection(kl_coef=0.5)
    trainer.begin_grpo(grpo)
    for step in range(2):
        values.append(policy_update(trainer, make_groups(step), grpo, 3e-3, 1.0)["loss"])
    save_adapter(model, Path(target), source, write=ranks.first)
    weights = {name: value.clone() for name, value in named_hf_tensors(model)}
    return {"losses": torch.tensor(values)} | weights


def all_ranks(file: str) -> None:
    """Forks the second rank, so that torch is imported once, and is the first."""
    if os.fork() == 0:
        os.environ |= {"RANK": "1"}
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    job = json.loads(Path(file).read_text())
    torch.set_num_threads(1)
    nodes = Ranks.start("cpu", shard="node")  # each a node, with a replica of the weights
    ranks = copy.copy(nodes)
    ranks.mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for name, work, options in job:
        result = globals()[work](nodes if name.startswith("nodes_") else ranks, **options)
        if ranks.first:
            torch.save(result, Path(file).parent / f"{name}.pt")
    nodes.close()


def on_two_ranks(folder: Path, jobs: list) -> dict[str, dict[str, torch.Tensor]]:
    """The results of the jobs, each a name, a function and its options."""
    (folder / "job.json").write_text(json.dumps(jobs))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "RANK": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3])),
    }
    done = subprocess.run(
        [sys.executable, __file__, str(folder / "job.json")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return {name: torch.load(folder / f"{name}.pt") for name, _, _ in jobs}


def agree(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        difference = (ours[name] - theirs[name]).double().norm()
        assert difference <= tolerance * theirs[name].double().norm() + 1e-12, (name, difference)


OFFLOAD = {"offload": True, "recompute": True}
VARIANTS = {
    "parts": {"budget": 40},
    "one_group": {"count": 1, "tied": False},
    "k2": {"kl": "k2", **OFFLOAD},
    "lora_kl": {"lora": 5, "kl": "full", "tied": False, "budget": 40, **OFFLOAD},
    "nodes_parts": {"budget": 40},
    "nodes_one_group": {"count": 1},
}


def expected(name: str) -> dict[str, torch.Tensor]:
    """On one rank, in one micro-batch, without recomputation and offload."""
    kept = {"tied", "count", "kl", "lora"}
    return gradients(ONE, **{key: x for key, x in VARIANTS[name].items() if key in kept})


@pytest.mark.slow
def test_two_ranks_and_two_nodes_with_a_replica_each_do_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 8000)
    source, one = str(tmp_path / "source"), str(tmp_path / "one")
    save_checkpoint(make_model(tied=False, seed=3), None, tmp_path / "source")
    steps(ONE, one)
    bf16 = {"dtype": "bfloat16", "budget": 10_000}
    in_bf16 = ("one_group", "lora_kl")
    jobs = [[name, "gradients", options] for name, options in VARIANTS.items()]
    jobs += [[f"bf16_{name}", "gradients", VARIANTS[name] | bf16] for name in in_bf16]
    for kind in ("ranks", "nodes"):
        folder = str(tmp_path / kind)
        jobs.append([f"{kind}_straight", "steps", {"folder": folder}])
        jobs.append([f"{kind}_resumed", "steps", {"folder": folder, "resumed": True}])
    jobs += [
        ["grown", "steps", {"folder": one, "resumed": True}],
        ["several", "several_updates", {"budget": 40, "offload": True}],
        ["adapted", "adapted", {"source": source, "target": str(tmp_path / "adapter")}],
    ]
    results = on_two_ranks(tmp_path, jobs)
    for name in VARIANTS:
        agree(results[name], expected(name), 1e-5)
    for name in in_bf16:  # the mean of two bf16 gradients has more digits than bf16 holds
        ours, exact = results[f"bf16_{name}"], expected(name)
        assert float(ours["metrics.loss"]) == pytest.approx(float(exact["metrics.loss"]), rel=0.01)
        with pytest.raises(AssertionError):  # it did compute in bf16
            agree(ours, exact, 1e-3)
        parts = [part for key, part in ours.items() if not key.startswith("metrics.")]
        assert parts and not any(torch.equal(part, part.bfloat16().float()) for part in parts)
    for kind in ("ranks", "nodes"):
        straight = results[f"{kind}_straight"]
        agree(results[f"{kind}_resumed"], straight, 0.0)  # to the bit
        alone = steps(ONE, str(tmp_path / kind), resumed=True)
        agree(alone, straight, 1e-5)  # on another number of ranks: rounding
    agree(results["grown"], results["ranks_straight"], 1e-5)
    agree(results["several"], several_updates(ONE), 1e-4)
    agree(results["adapted"], adapted(ONE, source, str(tmp_path / "alone")), 1e-10)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "alone")]
    agree(load_file(files[0]), load_file(files[1]), 1e-10)

    files = (tmp_path / "nodes" / "two").glob("*.safetensors")
    written = sum(part.numel() for file in files for part in load_file(file).values())
    trainer = make_trainer(ONE)
    trainer.begin_grpo(GrpoSection(optimizer="muon", kl_coef=0.5))
    held = trainer.tensors().values()
    assert written == sum(tensor.numel() for tensor in held)  # of one replica


if __name__ == "__main__":
    all_ranks(sys.argv[1])
