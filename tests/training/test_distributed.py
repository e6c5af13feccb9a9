"""Many ranks train as one does, however the model is sharded and packed.

Run as a program, `test_distributed.py FILE`, this file is all ranks, which do the jobs in the JSON
FILE.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import test_updates
import torch
from gguf_files import write_gguf
from safetensors.torch import load_file

from nanorchestra.config import Config, GrpoSection, ParallelSection
from nanorchestra.formats.load import load_model
from nanorchestra.model import checkpoint
from nanorchestra.model.checkpoint import named_hf_tensors, save_checkpoint
from nanorchestra.model.lora import adapters, add_adapters, reset, save_adapter
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.sharded import fill, whole
from nanorchestra.tools.endpoint import Endpoint
from nanorchestra.training.checkpoint import Checkpoints, notes_of
from nanorchestra.training.distributed import Ranks, shard_model
from nanorchestra.training.packing import Group, mini_batches, samples_in
from nanorchestra.training.rollout import CALL_S, rollout_timeout_s
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


def losses(ranks: Ranks, steps: int = 8, **options) -> dict[str, torch.Tensor]:
    trainer = make_trainer(ranks, **options)
    values = [supervised_update(trainer, make_groups(n), 3e-3)["loss"] for n in range(steps)]
    for n in range(steps):
        update = policy_update(trainer, make_groups(n), GrpoSection(), 1e-3, 1.0)
        values += [update["loss"], update["mismatch_kl"]]
    return {"losses": torch.tensor(values)}


def several_updates(ranks: Ranks, **options) -> dict[str, torch.Tensor]:
    """A step of grpo.mini_batch with a reference: all log-probabilities first, then the updates."""
    trainer = make_trainer(ranks, **options)
    grpo = GrpoSection(optimizer="muon", kl_coef=0.5, importance_cap=2.0, mini_batch=4)
    trainer.begin_grpo(grpo)
    values = []
    for step in range(2):
        groups = make_groups(step)
        trainer.compute_first_logprobs(groups, 1.0)
        for part in mini_batches(groups, grpo.mini_batch):
            update = policy_update(trainer, part, grpo, 1e-3, 1.0)
            values += [update["loss"], update["kl"], update["clip_fraction"]]
    # those of all samples, which this rank has whoever computed them
    samples = samples_in(groups)
    assert [len(sample.first_logprobs) for sample in samples] == [s.loss_ids for s in samples]
    logprobs = torch.tensor(sum([sample.first_logprobs for sample in samples], []))
    return {"losses": torch.tensor(values), "logprobs": logprobs}


def reference_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The weights of the frozen copy; adapters have none, and it is the weights themselves."""
    model = trainer.reference or trainer.model
    return {name: value.clone() for name, value in named_hf_tensors(model)}


def first_half(
    ranks: Ranks, folder: str, optimizer: str = "muon", **options
) -> dict[str, torch.Tensor]:
    """Three steps, a checkpoint, and three more while it is written."""
    trainer, values = make_trainer(ranks, **options), []
    trainer.begin_grpo(GrpoSection(optimizer=optimizer, kl_coef=0.5))
    checkpoints = Checkpoints(Path(folder), ranks)
    for step in range(6):
        values.append(supervised_update(trainer, make_groups(step), 3e-3)["loss"])
        if step == 2:
            checkpoints.save("three", trainer.tensors(), {"step": 3})
    checkpoints.wait()
    reference = reference_of(trainer)
    return {"losses": torch.tensor(values[3:])} | reference


def second_half(
    ranks: Ranks, folder: str, optimizer: str = "muon", **options
) -> dict[str, torch.Tensor]:
    trainer = make_trainer(ranks, seed=5, **options)  # other weights, which must not remain
    trainer.begin_grpo(GrpoSection(optimizer=optimizer, kl_coef=0.5))
    checkpoints = Checkpoints(Path(folder), ranks)
    newest = checkpoints.newest()
    checkpoints.load(newest, trainer.tensors())
    steps = range(notes_of(newest)["step"], 6)
    values = [supervised_update(trainer, make_groups(step), 3e-3)["loss"] for step in steps]
    reference = reference_of(trainer)
    return {"losses": torch.tensor(values)} | reference


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
    values = [supervised_update(trainer, make_groups(step), 3e-3)["loss"] for step in range(3)]
    grpo = GrpoSection(kl_coef=0.5)
    trainer.begin_grpo(grpo)
    for step in range(3):
        values.append(policy_update(trainer, make_groups(step), grpo, 3e-3, 1.0)["loss"])
    save_adapter(model, Path(target), source, write=ranks.first)
    weights = {name: value.clone() for name, value in named_hf_tensors(model)}
    return {"losses": torch.tensor(values)} | weights


def loaded(ranks: Ranks, source: str) -> dict[str, torch.Tensor]:
    """The weights of a model that is sharded as it is loaded."""

    def build(shape):
        return shard_model(Qwen3(shape), ranks, torch.float32)

    model, _ = load_model(source, dtype=None, build=build)
    return {name: value.clone() for name, value in named_hf_tensors(model)}


def exchange(ranks: Ranks) -> dict[str, torch.Tensor]:
    """What each rank has, also in two threads at a time."""
    other = ranks.with_own_group(600.0)
    assert ranks.all_gather(ranks.rank) == list(range(ranks.world_size))
    assert ranks.broadcast(["of", ranks.rank]) == ["of", 0]
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(lambda: [other.all_gather(("b", i)) for i in range(50)])
        here = [ranks.all_gather(("a", i)) for i in range(50)]
        assert here == [[("a", i)] * ranks.world_size for i in range(50)]
        assert ahead.result() == [[("b", i)] * ranks.world_size for i in range(50)]
    ranks.barrier()
    return {}


def all_ranks(file: str) -> None:
    """Forks the other ranks, so that torch is imported once, and is rank 0."""
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            break
    one_rank(file)


def one_rank(file: str) -> None:
    job = json.loads(Path(file).read_text())
    torch.set_num_threads(1)
    ranks = Ranks.start("cpu", shard=job["shard"], mixed_precision=True)
    flat = copy.copy(ranks)  # the same ranks without nodes
    flat.mesh = torch.distributed.init_device_mesh(
        "cpu", (ranks.world_size,), mesh_dim_names=("shard",)
    )
    for name, work, options in job["jobs"]:
        result = globals()[work](flat if name.startswith("flat") else ranks, **options)
        if ranks.first:
            torch.save(result, Path(file).parent / f"{name}.pt")
    ranks.close()


def run(
    folder: Path, world: int, jobs: list, *, node: int = 0
) -> dict[str, dict[str, torch.Tensor]]:
    """The results of the jobs, on nodes of `node` ranks with a replica each if given."""
    shard = "node" if node else "all"
    (folder / "job.json").write_text(json.dumps({"jobs": jobs, "shard": shard}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(node or world),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3])),
    }
    first = subprocess.run(
        [sys.executable, __file__, str(folder / "job.json")],
        env=os.environ | common | {"RANK": "0", "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert first.returncode == 0, first.stderr
    return {name: torch.load(folder / f"{name}.pt") for name, _, _ in jobs}


def agree(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        difference = (ours[name] - theirs[name]).double().norm()
        assert difference <= tolerance * theirs[name].double().norm() + 1e-12, (name, difference)


OFFLOAD = {"offload": True, "recompute": True}
VARIANTS = {
    "plain": {},
    "untied": {"tied": False},
    "parts": {"budget": 40},
    "one_group": {"count": 1},
    "offload": OFFLOAD,
    "full_kl": {"kl": "full", "tied": False},
    "k2": {"kl": "k2"},
    "lora": {"lora": 3},
    "lora_kl": {"lora": 5, "kl": "full", "tied": False, "budget": 40, **OFFLOAD},
}


def expected(name: str) -> dict[str, torch.Tensor]:
    """On one rank, in one micro-batch, without recomputation and offload."""
    kept = {"tied", "count", "kl", "lora"}
    return gradients(ONE, **{key: x for key, x in VARIANTS[name].items() if key in kept})


@pytest.mark.slow
def test_two_ranks_do_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 8000)
    model = make_model(tied=False, seed=3)
    save_checkpoint(model, None, tmp_path / "source")
    file = write_gguf(tmp_path / "source.gguf", model)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of the converted file
    one, two, source = str(tmp_path / "one"), str(tmp_path / "two"), str(tmp_path / "source")
    first_half(ONE, one)
    bf16 = {"dtype": "bfloat16", "budget": 10_000}
    in_bf16 = ("untied", "lora_kl")
    jobs = [[name, "gradients", options] for name, options in VARIANTS.items()]
    jobs += [[f"bf16_{name}", "gradients", VARIANTS[name] | bf16] for name in in_bf16]
    jobs += [
        ["muon", "losses", {}],
        ["adamw", "losses", {"optimizer": "adamw", "tied": False, "offload": True}],
        ["several", "several_updates", {"budget": 40, "offload": True}],
        ["first", "first_half", {"folder": two}],
        ["second", "second_half", {"folder": two}],
        ["grown", "second_half", {"folder": one}],
        ["exchange", "exchange", {}],
        ["loaded", "loaded", {"source": str(file)}],
        ["adapted", "adapted", {"source": source, "target": str(tmp_path / "adapter")}],
    ]
    results = run(tmp_path, 2, jobs)
    for name in VARIANTS:
        agree(results[name], expected(name), 1e-5)
    for name in in_bf16:  # the mean of two bf16 gradients has more digits than bf16 holds
        ours, exact = results[f"bf16_{name}"], expected(name)
        assert float(ours["metrics.loss"]) == pytest.approx(float(exact["metrics.loss"]), rel=0.01)
        with pytest.raises(AssertionError):  # it did compute in bf16
            agree(ours, exact, 1e-3)
        parts = [part for key, part in ours.items() if not key.startswith("metrics.")]
        assert parts and not any(torch.equal(part, part.bfloat16().float()) for part in parts)
    agree(results["muon"], losses(ONE), 1e-4)
    agree(results["adamw"], losses(ONE, optimizer="adamw", tied=False), 1e-4)
    agree(results["several"], several_updates(ONE), 1e-4)
    agree(results["second"], results["first"], 0.0)  # to the bit
    agree(second_half(ONE, two), results["first"], 1e-5)  # on another number of ranks: rounding
    agree(results["grown"], results["first"], 1e-5)
    agree(results["loaded"], dict(named_hf_tensors(model)), 0.0)
    agree(results["adapted"], adapted(ONE, source, str(tmp_path / "alone")), 1e-10)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("adapter", "alone")]
    agree(load_file(files[0]), load_file(files[1]), 1e-10)


@pytest.mark.slow
def test_four_ranks_and_two_nodes_with_a_replica_each_do_as_one(tmp_path):
    names = ("plain", "parts", "one_group")
    jobs = [[name, "gradients", VARIANTS[name]] for name in names]
    jobs += [[f"flat_{name}", "gradients", VARIANTS[name]] for name in names]
    jobs += [["muon", "losses", {"steps": 3}]]
    folder, adapters_folder = str(tmp_path / "run"), str(tmp_path / "adapters")
    halves = ("first_half", "second_half")
    jobs += [[name, name, {"folder": folder}] for name in halves]
    lora = {"lora": 3, "optimizer": "adamw"}  # 3 rows for 4 ranks
    offloaded = lora | {"folder": adapters_folder, "offload": True}
    jobs += [[f"flat_{name}", name, offloaded] for name in halves]
    results = run(tmp_path, 4, jobs, node=2)
    for name in names:
        agree(results[name], expected(name), 1e-5)
        agree(results[f"flat_{name}"], expected(name), 1e-5)
    agree(results["muon"], losses(ONE, steps=3), 1e-4)
    agree(results["second_half"], results["first_half"], 0.0)  # to the bit
    agree(second_half(ONE, folder), results["first_half"], 1e-5)
    agree(results["flat_second_half"], results["flat_first_half"], 0.0)
    agree(second_half(ONE, adapters_folder, **lora), results["flat_first_half"], 1e-5)
    files = (tmp_path / "run" / "three").glob("*.safetensors")
    written = sum(part.numel() for file in files for part in load_file(file).values())
    trainer = make_trainer(ONE)
    trainer.begin_grpo(GrpoSection(optimizer="muon", kl_coef=0.5))
    held = trainer.tensors().values()
    assert written == sum(tensor.numel() for tensor in held)  # of one replica


FAILING = """
import sys
from nanorchestra.errors import UserError, command
from nanorchestra.training.distributed import Ranks

@command("train.py")
def main(arguments):
    ranks = Ranks.start()
    if ranks.rank == 1:
        raise UserError("out of luck")
    ranks.barrier()

sys.exit(main([]))
"""


@pytest.mark.slow
def test_a_rank_that_fails_says_why_in_one_line_and_torchrun_ends_the_others(tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "failing.py")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode != 0 and done.stderr.count("train.py: out of luck\n") == 1


def test_the_time_out_of_a_rollout_covers_every_turn_with_the_longest_call():
    config = Config().replace({"rollout.turns": 50, "rollout.turn_tokens": 8000})
    assert rollout_timeout_s(config) > 3 * 50 * (Endpoint("").timeout_s + 8000 / 10)
    assert Endpoint("").timeout_s <= CALL_S


if __name__ == "__main__":
    all_ranks(sys.argv[1])
