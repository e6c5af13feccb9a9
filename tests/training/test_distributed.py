"""Many ranks train as one does: the same gradients and steps, however the model is sharded, packed and recomputed; and they end together.

Run as a program by the tests, `test_distributed.py FILE`, this file is one rank, which does what the JSON in FILE says.
"""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanorchestra.errors import UserError
from nanorchestra.model.lora import adapters, add_adapters, merge, reset, save_adapter
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.saving import save_checkpoint
from nanorchestra.model.sharded import fill, whole
from nanorchestra.model.weights import DTYPES, load_model, named_hf_tensors
from nanorchestra.training.checkpoint import Checkpoints
from nanorchestra.training.objectives import Objective
from nanorchestra.training.optimizers import Muon
from nanorchestra.training.packing import Group, Sample
from nanorchestra.training.ranks import Ranks, shard_model
from nanorchestra.training.trainer import Trainer, TrainerSettings

VOCAB = 90
TIED = dict(
    vocab_size=VOCAB,
    hidden_size=36,
    intermediate_size=50,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=10,
    max_position_embeddings=256,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
)  # sizes that no number of ranks divides
UNTIED = TIED | dict(tie_word_embeddings=False)


def make_model(shape: dict, seed: int = 0) -> Qwen3:
    model = Qwen3(ModelConfig(**shape))
    model.init_weights(seed)
    return model


def make_groups(seed: int, count: int = 5) -> list[Group]:
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(VOCAB - 6) for _ in range(n)]

    return [
        Group(
            [3, 4] + ids(rng.randint(3, 30)),
            [
                Sample(
                    said := ids(rng.randint(2, 30)),
                    [rng.random() < 0.7 for _ in said[1:]] + [True],
                    [rng.uniform(-5, -4) for _ in said],
                    rng.uniform(-2, 2),
                )
                for _ in range(rng.choice((1, 2, 4)))
            ],
        )
        for _ in range(count)
    ]


def make_trainer(
    ranks: Ranks,
    shape: dict = TIED,
    budget: int = 300,
    offload: bool = False,
    recompute: bool = False,
    optimizer: str = "muon",
    seed: int = 0,
    lora: int = 0,
    dtype: str = "float32",
) -> Trainer:
    """`dtype`: of computing, in a sharded model."""
    model = make_model(shape, seed)
    if lora:
        add_adapters(model.to(DTYPES[dtype]), lora, 6.0, seed)
    model = shard_model(model, ranks, DTYPES[dtype], cpu_offload=offload)
    for i, (_, module) in enumerate(adapters(model)):  # adapters that have learnt something
        fill(
            module.lora_b,
            0.1 * torch.randn(module.lora_b.shape, generator=torch.Generator().manual_seed(i)),
        )
    return Trainer(
        model,
        vocab_limit=VOCAB - 6,
        ranks=ranks,
        optimizer=optimizer,
        settings=TrainerSettings(
            token_budget=budget,
            dtype=DTYPES[dtype],
            activation_checkpointing=recompute,
            cpu_offload=offload,
        ),
    )


# What a rank does; each deed returns tensors or numbers, alike on all ranks.


def gradients(
    ranks: Ranks, kl: str | None = None, count: int = 5, **options
) -> dict[str, torch.Tensor]:
    """Of one policy step, by name and whole; beside them the metrics."""
    trainer = make_trainer(ranks, **options)
    taken = {}

    def take():
        assert {
            dtype
            for p in trainer.model.parameters()
            if p.requires_grad
            for dtype in (p.dtype, p.grad.dtype)
        } == {torch.float32}
        assert all(
            p.dtype == DTYPES[options.get("dtype", "float32")]
            for p in trainer.model.parameters()
            if not p.requires_grad
        )
        taken.update(
            {
                name: whole(p.grad).clone()
                for name, p in trainer.model.named_parameters()
                if p.grad is not None
            }
        )
        return float("nan")  # no update

    trainer._clip_gradients = take
    if kl:
        trainer.freeze_reference()
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1.1)
    objective = Objective(kl_coef=0.5, kl=kl) if kl else Objective()
    metrics = trainer.policy_step(make_groups(1, count), 0.0, objective).metrics
    del metrics["grad_norm"], metrics["skipped"]
    return taken | {
        f"metrics.{name}": torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
        if name != "flops"
    }  # what packs share is computed once in each


def losses(ranks: Ranks, steps: int = 20, **options) -> dict[str, torch.Tensor]:
    trainer = make_trainer(ranks, **options)
    values = [
        trainer.supervised_step(make_groups(step), 3e-3)["loss"] for step in range(steps // 2)
    ]
    values += [
        trainer.policy_step(make_groups(step), 1e-3, Objective()).metrics["loss"]
        for step in range(steps // 2)
    ]
    return {"losses": torch.tensor(values)}


def adapted(ranks: Ranks, source: str, target: str) -> dict[str, torch.Tensor]:
    """As train.py does with lora.rank: from a checkpoint, a warm start, a merge, steps with the base as the reference; the merged weights, and files.

    In float64: Adam's first step is the gradient's sign, so that the rounding of a gradient that is nearly zero moves a weight by twice the rate.
    """

    def build(shape):
        model = Qwen3(shape)
        add_adapters(model, 3, 6.0, 0)
        return shard_model(model.double(), ranks, torch.float64)

    model, _ = load_model(source, dtype=None, build=build)
    reset(model, 1)
    settings = TrainerSettings(token_budget=300)
    trainer = Trainer(
        model, vocab_limit=VOCAB - 6, ranks=ranks, optimizer="muon", settings=settings
    )
    losses = [trainer.supervised_step(make_groups(step), 3e-3)["loss"] for step in range(3)]
    save_adapter(model, Path(target) / "before", source, write=ranks.first)
    merge(model, 2)
    trainer.new_optimizer("adamw")
    trainer.freeze_reference()
    losses += [
        trainer.policy_step(make_groups(step), 3e-3, Objective(kl_coef=0.5)).metrics["loss"]
        for step in range(3)
    ]
    save_adapter(model, target, source, before=Path(target) / "before", write=ranks.first)
    return {"losses": torch.tensor(losses)} | {
        name: value.clone() for name, value in named_hf_tensors(model)
    }


def first_half(ranks: Ranks, folder: str) -> dict[str, torch.Tensor]:
    """Three steps, a checkpoint, and three more while it is written."""
    trainer = make_trainer(ranks)
    trainer.freeze_reference()
    checkpoints = Checkpoints(Path(folder), 2, ranks)
    values = []
    for step in range(6):
        values.append(trainer.supervised_step(make_groups(step), 3e-3)["loss"])
        if step == 2:
            checkpoints.save("three", trainer.tensors(), {"step": 3})
    checkpoints.wait()
    return {"losses": torch.tensor(values[3:])} | {
        name: value.clone() for name, value in named_hf_tensors(trainer.reference)
    }


def second_half(ranks: Ranks, folder: str) -> dict[str, torch.Tensor]:
    trainer = make_trainer(ranks, seed=5)  # other weights, which must not remain
    notes = Checkpoints(Path(folder), 2, ranks).restore(lambda notes: trainer.prepare("muon", True))
    values = [
        trainer.supervised_step(make_groups(step), 3e-3)["loss"] for step in range(notes["step"], 6)
    ]
    return {"losses": torch.tensor(values)} | {
        name: value.clone() for name, value in named_hf_tensors(trainer.reference)
    }


def export(ranks: Ranks, source: str, target: str) -> dict[str, torch.Tensor]:
    """Loads a checkpoint in shards, without ever holding it whole, and writes it again."""
    model, _ = load_model(source, build=lambda shape: shard_model(Qwen3(shape), ranks))
    save_checkpoint(model, None, target, dtype=torch.float32, write=ranks.first)
    return {}


def small_talk(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Sums, shares of work, and a UserError that one rank has."""
    assert ranks.map(lambda mine: [(i, ranks.rank) for i in mine], range(7), 2) == [
        (i, i // 2 % ranks.world) for i in range(7)
    ]
    assert ranks.sum({"a": 1.0, "b": float(ranks.rank)}) == {
        "a": ranks.world,
        "b": sum(range(ranks.world)),
    }
    assert ranks.any(ranks.rank == 1) and not ranks.any(False)

    def refuse(gathers: int) -> None:
        if ranks.rank == 1:
            raise UserError("not here")
        for _ in range(gathers):  # where the others may be by then
            ranks.gather(None)

    for gathers in (0, 1):
        with pytest.raises(UserError, match="not here"):
            ranks.together(lambda: refuse(gathers))
    return {}


def fall_silent(ranks: Ranks, how: str) -> dict[str, torch.Tensor]:
    """Rank 1 ends, or stands still; rank 0 waits for it in a collective."""
    if ranks.rank == 1:
        if how == "error":
            ranks.fail("out of luck")
            time.sleep(60)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    ranks.gather(None)
    return {}


def one_rank(file: str) -> None:
    job = json.loads(Path(file).read_text())
    torch.set_num_threads(1)
    if job.get("silence"):
        import nanorchestra.training.ranks as distributed

        distributed.BEAT, distributed.SILENCE = 0.2, job["silence"]
    ranks = Ranks.start(
        "cpu", shard=job.get("shard", "all"), sharded=job.get("sharded", False), timeout=120
    )
    flat = copy.copy(ranks)  # the same ranks without nodes
    flat.mesh = torch.distributed.init_device_mesh("cpu", (ranks.world,), mesh_dim_names=("shard",))
    for name, deed, options in job["deeds"]:
        result = globals()[deed](flat if options.pop("flat", False) else ranks, **options)
        if ranks.first:
            torch.save(result, Path(file).parent / f"{name}.pt")
    ranks.close()


def start(
    tmp_path: Path, world: int, deeds: list, *, local: int | None = None, **settings
) -> list[subprocess.Popen]:
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"deeds": deeds, **settings}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
        "LOCAL_WORLD_SIZE": str(local or world),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(file)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank % (local or world))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def run(tmp_path: Path, world: int, deeds: list, **settings) -> dict[str, dict[str, torch.Tensor]]:
    processes = start(tmp_path, world, deeds, **settings)
    outs = [process.communicate(timeout=400)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outs)
    return {name: torch.load(tmp_path / f"{name}.pt") for name, _, _ in deeds}


def agree(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        difference = (ours[name] - theirs[name]).double().norm()
        assert difference <= tolerance * theirs[name].double().norm() + 1e-12, (
            name,
            float(difference),
            float(theirs[name].norm()),
        )


VARIANTS = [
    ["plain", "gradients", {}],
    ["untied", "gradients", {"shape": UNTIED}],
    ["parts", "gradients", {"budget": 40}],
    ["recompute", "gradients", {"recompute": True}],
    ["offload", "gradients", {"offload": True, "recompute": True}],
    ["full_kl", "gradients", {"kl": "full", "shape": UNTIED}],
    ["lora", "gradients", {"lora": 3}],
    [
        "lora_kl",
        "gradients",
        {
            "lora": 5,
            "kl": "full",
            "shape": UNTIED,
            "budget": 40,
            "offload": True,
            "recompute": True,
        },
    ],
    ["k3", "gradients", {"kl": "k3"}],
    ["one_group", "gradients", {"count": 1}],
]
ONE = Ranks()


def expected(variant: list) -> dict[str, torch.Tensor]:
    options = {
        name: value
        for name, value in variant[2].items()
        if name not in ("budget", "recompute", "offload")
    }
    return gradients(ONE, **options)


@pytest.mark.slow
def test_two_ranks_do_as_one(tmp_path):
    model = make_model(UNTIED, 3)
    save_checkpoint(model, None, tmp_path / "source", max_shard_bytes=8000)
    halves = [
        ["first", "first_half", {"folder": str(tmp_path / "two")}],
        ["second", "second_half", {"folder": str(tmp_path / "two")}],
    ]
    first_half(ONE, str(tmp_path / "one"))
    results = run(
        tmp_path,
        2,
        [
            *VARIANTS,
            ["muon", "losses", {}],
            ["adamw", "losses", {"optimizer": "adamw", "shape": UNTIED, "offload": True}],
            *halves,
            ["grown", "second_half", {"folder": str(tmp_path / "one")}],
            ["talk", "small_talk", {}],
            [
                "adapted",
                "adapted",
                {"source": str(tmp_path / "source"), "target": str(tmp_path / "adapter")},
            ],
            [
                "export",
                "export",
                {"source": str(tmp_path / "source"), "target": str(tmp_path / "target")},
            ],
        ],
    )
    for variant in VARIANTS:
        agree(results[variant[0]], expected(variant), 1e-5)
    moved = {
        name.rpartition(".")[2]
        for name, gradient in results["lora"].items()
        if gradient.any() and "metrics." not in name
    }
    assert moved == {"lora_a", "lora_b"}
    agree(results["muon"], losses(ONE), 1e-4)
    agree(results["adamw"], losses(ONE, optimizer="adamw", shape=UNTIED), 1e-4)
    agree(results["second"], results["first"], 0.0)  # goes on to the bit
    agree(
        second_half(ONE, str(tmp_path / "two")), results["first"], 1e-5
    )  # and on another number of ranks within rounding
    agree(results["grown"], results["first"], 1e-5)
    agree(
        results["adapted"], adapted(ONE, str(tmp_path / "source"), str(tmp_path / "alone")), 1e-10
    )
    saved, alone = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "alone")
    )
    agree(saved, alone, 1e-10)
    for (name, tensor), (_, again) in zip(
        named_hf_tensors(model), named_hf_tensors(load_model(tmp_path / "target")[0]), strict=True
    ):
        assert torch.equal(tensor, again), name


@pytest.mark.slow
def test_four_ranks_and_two_nodes_of_two_with_a_replica_each_do_as_one(tmp_path):
    variants = [*VARIANTS[:3], VARIANTS[-1]]
    flat = [[f"flat_{name}", deed, options | {"flat": True}] for name, deed, options in variants]
    results = run(
        tmp_path, 4, [*variants, *flat, ["muon", "losses", {"steps": 6}]], local=2, shard="node"
    )
    for variant in variants:
        agree(results[variant[0]], expected(variant), 1e-5)
        agree(results[f"flat_{variant[0]}"], expected(variant), 1e-5)
    agree(results["muon"], losses(ONE, steps=6), 1e-4)


@pytest.mark.slow
def test_two_ranks_that_compute_in_bf16_hold_and_reduce_float32(tmp_path):
    """As one rank does that computes so; of a model with adapters only these are float32. With a micro-batch each, the mean of two bf16 gradients has more digits than bf16 holds."""
    plain = [VARIANTS[i] for i in (1, 4, 5, 6, 7)]
    variants = [
        [name, deed, options | {"dtype": "bfloat16", "budget": 10_000}]
        for name, deed, options in plain
    ]
    (tmp_path / "alone").mkdir()
    two, alone = run(tmp_path, 2, variants), run(tmp_path / "alone", 1, variants, sharded=True)
    for variant in plain:
        ours, exact = two[variant[0]], expected(variant)
        agree(ours, alone[variant[0]], 0.01)
        assert float(ours["metrics.loss"]) == pytest.approx(float(exact["metrics.loss"]), rel=0.01)
        with pytest.raises(AssertionError):  # it was bf16
            agree(ours, exact, 1e-3)
        gradients = [part for part in ours if not part.startswith("metrics.")]
        assert gradients and not any(
            torch.equal(ours[part], ours[part].bfloat16().float()) for part in gradients
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, reason",
    [("kill", ""), ("stop", "rank 1: no sign of life for 3 s"), ("error", "rank 1: out of luck")],
)
def test_when_a_rank_ends_the_others_do_and_say_why(tmp_path, how, reason):
    first, second = start(tmp_path, 2, [["end", "fall_silent", {"how": how}]], silence=3)
    try:
        out, _ = first.communicate(timeout=60)
        assert (
            first.returncode != 0 and reason in out and (reason or "peer" in out or "store" in out)
        ), out
    finally:
        second.kill()
        second.communicate()


def test_one_process_saves_what_was_and_goes_on_to_the_bit(tmp_path):
    straight = first_half(ONE, str(tmp_path))
    agree(second_half(ONE, str(tmp_path)), straight, 0.0)


def test_a_damaged_checkpoint_and_a_full_disk_leave_the_one_before(tmp_path, monkeypatch, capsys):
    trainer = make_trainer(ONE)
    checkpoints = Checkpoints(tmp_path, 2, ONE)
    for name in "abc":
        checkpoints.save(name, trainer.tensors(), {"name": name})
    checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    import nanorchestra.training.checkpoint as module

    real = module.dcp.async_save

    def full(*args, **options):  # the last bytes no longer fit
        def fail(*args):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            future = real(*args, **options)
            future.exception()
        return future

    monkeypatch.setattr(module.dcp, "async_save", full)
    checkpoints.save("d", trainer.tensors(), {})
    with pytest.raises(
        UserError, match="d: the checkpoint cannot be written: OSError: .*No space left"
    ):
        checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]
    shard = next((tmp_path / "c").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-7])
    assert Checkpoints(tmp_path, 2, ONE).restore(lambda notes: trainer.tensors()) == {"name": "b"}
    assert "c: damaged" in capsys.readouterr().err
    (tmp_path / "b" / "notes.json").unlink()
    with pytest.raises(UserError, match="none of its 2 checkpoints can be read"):
        Checkpoints(tmp_path, 2, ONE).restore(lambda notes: trainer.tensors())


def _notes(change):
    def damage(folder):
        data = json.loads((folder / "notes.json").read_text())
        (folder / "notes.json").write_text(json.dumps(change(data)))

    return damage


def _garbage(pattern, begin):
    def damage(folder):
        file = next(folder.glob(pattern))
        data = file.read_bytes()
        at = int(begin * len(data))
        file.write_bytes(data[:at] + random.Random(0).randbytes(200) + data[at + 200 :])

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _notes(lambda data: []),
        _notes(lambda data: data | {"files": [1]}),
        _notes(lambda data: data | {"notes": {"name": "x"}}),
        _notes(lambda data: data | {"notes": None}),
        lambda folder: (folder / "notes.json").write_text("[" * 100_000),
        _garbage("*.distcp", 0),
        _garbage("*.distcp", 0.3),
        _garbage(".metadata", 0.5),
    ],
)
def test_what_is_not_as_it_was_written_is_named_and_the_one_before_taken(tmp_path, capfd, damage):
    trainer, checkpoints = make_trainer(ONE), Checkpoints(tmp_path, 2, ONE)
    for name in "ab":
        checkpoints.save(name, trainer.tensors(), {"name": name, "step": 1})
    checkpoints.wait()
    damage(tmp_path / "b")
    assert Checkpoints(tmp_path, 2, ONE).restore(lambda notes: trainer.tensors()) == {
        "name": "a",
        "step": 1,
    }
    said = capfd.readouterr().err.splitlines()
    assert (
        len(said) == 1
        and said[0].startswith(f"{tmp_path / 'b'}: damaged (")
        and said[0].endswith("trying the one before")
    )


def test_a_file_where_the_checkpoints_belong_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints: cannot be made .*must be a directory"):
        Checkpoints(tmp_path / "checkpoints", 2, ONE)


def test_muon_is_torchs_bit_for_bit_on_whole_matrices():
    ours, theirs = (
        [
            torch.nn.Parameter(torch.randn(n, m, generator=torch.Generator().manual_seed(n)))
            for n, m in ((8, 20), (20, 8))
        ]
        for _ in range(2)
    )
    mine, torchs = (
        Muon(ours, 0.02, 0.1),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        mine.step()
        torchs.step()
        assert all(torch.equal(p, q) for p, q in zip(ours, theirs))


if __name__ == "__main__":
    one_rank(sys.argv[1])
