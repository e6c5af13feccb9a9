"""The run as a user has it: killed and resumed it ends the same, and what is wrong gets one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TIMINGS

ROOT = Path(__file__).parent.parent
SMALL = [
    "--run.threads",
    "1",
    "--run.checkpoint_every",
    "2",
    "--model.vocab_size",
    "700",
    "--model.tokenizer_tasks",
    "40",
    "--warm_start.steps",
    "5",
    "--warm_start.few_steps",
    "2",
    "--warm_start.prompts",
    "3",
    "--grpo.steps",
    "5",
    "--grpo.prompts",
    "2",
    "--grpo.group_size",
    "4",
    "--grpo.min_std",
    "0",
    "--evaluation.tasks",
    "6",
    "--evaluation.domain_tasks",
    "3",
    "--task.world",
    "miniature=0.7, domains=0.3",
    "--rollout.turns",
    "2",
    "--rollout.turn_tokens",
    "24",
    "--rollout.context_tokens",
    "900",
]


def train(*arguments, wait=True, **options):
    command = [sys.executable, "train.py", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if not wait:
        return process
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def rows(run):
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMINGS}
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]


def final(run):
    summary = json.loads((run / "summary.json").read_text())
    return summary["steps"], summary["held_out"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    code, out = train(*SMALL, "--run.root", root, "--run.name", "straight")
    assert code == 0, out
    return root / "straight", out


@pytest.mark.slow
def test_a_run_leaves_what_the_readme_promises(straight):
    run, out = straight
    assert {
        "config.toml",
        "metrics.jsonl",
        "trajectories.jsonl",
        "report.html",
        "summary.json",
        "checkpoints",
        "model",
    } <= set(os.listdir(run))
    held_out = final(run)[1]
    for summary in (
        held_out["before"],
        held_out["after"],
        *(held_out["routers"][r] for r in ("strongest", "cheapest", "cascade", "random", "rule")),
    ):
        assert {"reward", "accuracy", "cost_usd", "latency_s", "preference"} <= set(summary)
    assert "before" in out and "after" in out and "strongest" in out
    from nanorchestra import load_model

    model, tokenizer = load_model(run / "model", device="cpu", dtype="float32")
    assert tokenizer is not None and model.config.eos_token_ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase, how",
    [("warm_start", signal.SIGKILL), ("grpo", signal.SIGKILL), ("grpo", signal.SIGINT)],
)
def test_stopped_in_the_middle_and_resumed_it_ends_the_same(straight, tmp_path, phase, how):
    process = train(*SMALL, "--run.root", tmp_path, "--run.name", "cut", wait=False)
    log = tmp_path / "cut" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not (
        log.exists()
        and any(
            f'"{phase}"' in line and '"step": 3' in line for line in log.read_text().splitlines()
        )
    ):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    process.send_signal(how)
    out, _ = process.communicate(timeout=100)
    if how == signal.SIGINT and process.returncode != 0:
        assert process.returncode == 130 and "--resume" in out
    code, out = train("--resume", tmp_path / "cut")
    assert code == 0, out
    assert rows(tmp_path / "cut") == rows(straight[0])
    assert final(tmp_path / "cut") == final(straight[0])
    code, out = train("--resume", tmp_path / "cut")
    assert code == 2 and "finished" in out


@pytest.mark.slow
def test_what_is_wrong_gets_one_line_and_touches_nothing(straight, tmp_path):
    run = straight[0]
    before = (run / "metrics.jsonl").read_bytes()
    cases = [
        ([*SMALL, "--run.root", run.parent, "--run.name", "straight"], "straight"),
        (["--grpo.stepz", "3"], "unknown key grpo.stepz"),
        (["--resume", tmp_path / "nowhere"], "nowhere"),
        (["--model.path", tmp_path, "--run.root", tmp_path / "r"], "config.json"),
        (["--run.root", "/proc/nothing"], "/proc/nothing"),
        (["--run.root", tmp_path / "logs", "--run.log_to", "tensorbord"], "run.log_to"),
    ]
    for arguments, words in cases:
        code, out = train(*arguments)
        lines = [line for line in out.splitlines() if line.startswith("train.py:")]
        assert code == 2 and len(lines) == 1 and words in lines[0] and "Traceback" not in out, (
            arguments,
            out,
        )
    assert not any((tmp_path / "r").iterdir())  # the name is free for the corrected command
    assert (run / "metrics.jsonl").read_bytes() == before and not (tmp_path / "logs").exists()


def test_only_a_second_sigint_ends_the_run_at_once():
    import train as program

    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop = program.Stop()
        for number in (
            signal.SIGTERM,
            signal.SIGTERM,
        ):  # a scheduler's, to torchrun and to the ranks
            signal.raise_signal(number)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@pytest.fixture
def training(tmp_path):
    """A run of the bundled model with two small steps of each phase, wired but not begun."""
    import train as program
    from nanorchestra.config import load_config, to_toml
    from nanorchestra.model.weights import named_hf_tensors
    from nanorchestra.report.run import Run
    from nanorchestra.tools.sandbox import Sandbox
    from nanorchestra.training.ranks import Ranks

    config = load_config(
        None,
        [
            *REAL,
            "--warm_start.steps",
            "2",
            "--grpo.steps",
            "2",
            "--grpo.prompts",
            "2",
            "--run.skip_limit",
            "2",
            "--grpo.kl_coef",
            "0",
        ],
    )
    with Sandbox() as sandbox:
        training = program.Training(
            config, Run.create(tmp_path / "run", to_toml(config)), sandbox, Ranks()
        )
        training.engine.update_weights(named_hf_tensors(training.trainer.model))
        yield training


def test_a_loss_that_is_not_finite_is_kept_to_be_looked_at_and_ends_the_run_when_it_stays(training):
    import math
    import types
    from collections import Counter

    from nanorchestra.errors import UserError
    from nanorchestra.training.trainer import StepResult

    stop, run = types.SimpleNamespace(asked=False), training.run
    bad = {"loss": math.nan, "skipped": 1.0, "tokens": 9.0}
    training.trainer.supervised_step = lambda *args: dict(bad)
    training.trainer.policy_step = lambda groups, *args, **options: StepResult(
        dict(bad), [[None] * len(group.samples) for group in groups]
    )
    with pytest.raises(
        UserError,
        match="warm_start step 2: the loss or its gradient is not finite, 2 steps in a row; .*skipped.json",
    ):
        training.warm_start(stop)
    shown = json.loads((run.path / "skipped.json").read_text())
    assert (
        shown["step"] == 2
        and len(shown["texts"]) == 3
        and all("<|im_start|>" in text for text in shown["texts"])
    )
    training.phase, training.step, training.skipped = "grpo", 0, 0
    training.practice.groups = lambda tasks, trajectories: (
        [trajectories],
        Counter(),
    )
    with pytest.raises(UserError, match='grpo step 2: .*trajectories.jsonl, phase "skipped"'):
        training.grpo(stop)
    rows = list(run.rows("trajectories"))
    assert {row["phase"] for row in rows} == {"skipped"} and len(
        rows
    ) == 2 * 2 * 4  # every attempt of both steps


def test_a_step_without_a_group_that_teaches_says_so_and_changes_nothing(training, capsys):
    import types
    from collections import Counter

    training.phase, training.practice.groups = (
        "grpo",
        lambda tasks, trajectories: ([], Counter(homogeneous=len(tasks))),
    )
    before = {
        name: tensor.clone()
        for name, tensor in training.trainer.tensors().items()
        if name.startswith("model.")
    }
    assert training.grpo(types.SimpleNamespace(asked=False))
    assert (
        capsys.readouterr().out.count(
            "no group is left to learn from (homogeneous 100%); no update"
        )
        == 2
    )
    assert all(
        (tensor == before[name]).all()
        for name, tensor in training.trainer.tensors().items()
        if name in before
    )


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--gpus", "abc"], "--gpus: invalid int"),
        (["--rollouts", "x"], "--rollouts: invalid int"),
        (["--memory"], "--memory: expected one"),
        (["--run.name", ""], "run.name"),
        (["--run.device", "cuda"], "run.device is 'cuda'"),
    ],
)
def test_a_bad_argument_is_one_line_and_makes_nothing(
    tmp_path, monkeypatch, capsys, arguments, says
):
    import train as program

    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert program.main(arguments) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("train.py: ")
        and says in said
        and said.count("\n") == 1
        and not list(tmp_path.iterdir())
    )


def test_a_context_shorter_than_the_miniatures_prompts_is_refused(make_training):
    from nanorchestra.errors import UserError

    with pytest.raises(
        UserError,
        match=r"miniature: prompts of \d+ tokens; rollout.context_tokens is 200, it must be at least",
    ):
        make_training("short", "--rollout.context_tokens", "200")


def test_a_tokenizer_directory_that_a_killed_run_left_empty_is_filled(tmp_path, sandbox):
    import train as program
    from nanorchestra.config import load_config, to_toml
    from nanorchestra.report.run import Run
    from nanorchestra.training.ranks import Ranks

    config = load_config(None, [*SMALL[4:8], "--run.root", str(tmp_path)])
    run = Run.create(tmp_path / "run", to_toml(config))
    (run.path / "tokenizer").mkdir()
    assert (
        program.Training(config, run, sandbox, Ranks()).tokenizer.vocab_size <= 700
        and (run.path / "tokenizer" / "tokenizer.json").is_file()
    )


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("summary.json", '{"steps": 3', "summary.json: is not a JSON object"),
        ("summary.json", '{"steps": 3}', "this run is finished"),
        ("config.toml", "", "config.toml: run.name is missing"),
        ("config.toml", "[run]\nname = 'x'\n", "config.toml: run.root is missing"),
    ],
)
def test_a_run_whose_small_files_are_damaged_does_not_go_on(tmp_path, name, content, says):
    import train as program
    from nanorchestra.config import Config, to_toml
    from nanorchestra.errors import UserError
    from nanorchestra.report.run import Run

    run = Run.create(tmp_path / "run", to_toml(Config()))
    assert program.open_run(None, [], run.path, False)[2]
    (run.path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        program.open_run(None, [], run.path, False)


@pytest.mark.slow
def test_a_damaged_checkpoint_falls_back_to_the_one_before(straight, tmp_path):
    import shutil

    run = tmp_path / "copy"
    shutil.copytree(straight[0], run)
    (run / "summary.json").unlink()
    newest = next(sorted((run / "checkpoints").iterdir())[-1].glob("*.distcp"))
    newest.write_bytes(newest.read_bytes()[:1000])
    code, out = train("--resume", run)
    assert code == 0 and "damaged" in out
    assert rows(run) == rows(straight[0]) and final(run) == final(straight[0])


def test_attempts_that_the_infrastructure_failed_are_made_again_then_left_out_then_end_the_run():
    import types

    import train as program
    from nanorchestra.config import load_config
    from nanorchestra.errors import UserError
    from nanorchestra.records import Trajectory
    from nanorchestra.training.ranks import Ranks

    failures: dict[int, int] = {}

    class Rollout:
        def run(self, environments, seeds):
            made = []
            for task, seed in environments:
                failures[task] -= 1
                made.append(
                    Trajectory(
                        str(task),
                        seed,
                        0,
                        [],
                        [],
                        [],
                        [],
                        status="infrastructure" if failures[task] >= 0 else "answered",
                    )
                )
            return made

    def attempts(*counts):
        failures.update(enumerate(counts))
        house = types.SimpleNamespace(
            ranks=Ranks(),
            config=load_config(None, ["--rollout.retries", "2", "--rollout.failed_share", "0.4"]),
            step=0,
            practice=types.SimpleNamespace(environment=lambda task, seed: (task, seed)),
        )
        return program.Training._attempts(house, Rollout(), range(len(counts)), [7] * len(counts))

    trajectories, retried = attempts(0, 1, 0, 2, 9)
    assert [t.status for t in trajectories] == ["answered"] * 4 + [
        "infrastructure"
    ] and retried == 5
    assert [t.task_id for t in trajectories] == list("01234")
    with pytest.raises(UserError, match="3 of 5 attempts failed"):
        attempts(0, 9, 9, 9, 0)


@pytest.mark.slow
def test_a_run_imitates_the_best_of_another_in_a_rebuilt_context_and_leaves_an_adapter(tmp_path):
    """Rollouts of the bundled model, from which the next run learns; its adapter makes of the model it began with the one it ended with."""
    import torch
    from safetensors.torch import load_file
    from test_lora import applied

    code, out = train(
        *REAL,
        "--run.root",
        tmp_path,
        "--run.name",
        "first",
        "--rollout.context",
        "rebuild",
        "--warm_start.steps",
        "1",
        "--grpo.steps",
        "2",
        "--grpo.prompts",
        "4",
        "--run.record_groups",
        "4",
    )
    assert code == 0, out
    recorded = [
        json.loads(line)
        for line in (tmp_path / "first" / "trajectories.jsonl").read_text().splitlines()
    ]
    assert any(turn["context"] for row in recorded for turn in row["turns"])
    second = [
        *REAL,
        "--run.root",
        tmp_path,
        "--run.name",
        "second",
        "--lora.rank",
        "4",
        "--rollout.context",
        "rebuild",
        "--warm_start.trajectories",
        tmp_path / "first",
        "--warm_start.keep_outcome",
        "0",
        "--warm_start.steps",
        "3",
        "--grpo.steps",
        "2",
    ]
    code, out = train(*second)
    assert code == 0 and "warm start on " in out and "of an evaluation or a skipped step" in out, (
        out
    )
    base, model = (
        load_file(path / "model.safetensors")
        for path in (ROOT / "assets" / "nano", tmp_path / "second" / "model")
    )
    for name, weight in applied(
        {name: tensor.float() for name, tensor in base.items()}, tmp_path / "second" / "adapter"
    ).items():
        torch.testing.assert_close(weight, model[name], rtol=1e-5, atol=1e-6)
    assert any(not torch.equal(base[name].float(), model[name]) for name in model)
    (tmp_path / "first" / "trajectories.jsonl").write_text("{}\n")
    code, out = train(*second, "--run.name", "third")
    assert (
        code == 2
        and "trajectories.jsonl, line 1: task_id is null; it must be text" in out
        and "Traceback" not in out
    )


def test_the_best_evaluation_keeps_its_checkpoint_the_first_of_equals(monkeypatch, tmp_path):
    import types

    import train as program
    from nanorchestra.config import load_config
    from nanorchestra.report.run import Run
    from nanorchestra.training.ranks import Ranks

    values = iter([])
    monkeypatch.setattr(
        program,
        "summarise",
        lambda tasks, trajectories: {
            "reward": 0.0,
            "cost_per_correct_usd": next(values),
            "by_kind": {},
        },
    )
    asked, exported = [], []

    def held_out(tasks, name):
        asked.append(tasks)
        return None, []

    def evaluations(*measured, best=None):
        nonlocal values
        values = iter(measured)
        config = load_config(
            None,
            [
                "--evaluation.every",
                "2",
                "--evaluation.every_tasks",
                "3",
                "--evaluation.tasks",
                "5",
                "--evaluation.best",
                "cost_per_correct_usd",
                "--grpo.steps",
                "7",
            ],
        )
        run = Run.create(tmp_path / str(len(list(tmp_path.iterdir()))), "")
        (run.path / "model-best").mkdir()
        house = types.SimpleNamespace(
            config=config,
            ranks=Ranks(),
            run=run,
            best=best,
            practice=types.SimpleNamespace(
                judged_by=lambda count, start: [f"held_out-{start + i}" for i in range(count)]
            ),
            _held_out=held_out,
            engine=types.SimpleNamespace(update_weights=lambda: None),
            export=lambda path: exported.append(house.step),
            _append=lambda log, row: run.append(log, row),
        )
        exported.clear()
        for house.step in range(1, 8):
            program.Training._evaluate_on_the_way(house)
        written = list(run.rows("metrics"))
        assert [row["step"] for row in written] == [2, 4, 6, 7] and all(
            row["phase"] == "evaluation" and "by_kind" not in row for row in written
        )
        if exported:
            assert json.loads((run.path / "model-best.json").read_text()) == house.best
        return exported[:], house.best

    assert evaluations(0.3, 0.1, 0.1, 0.2) == (
        [2, 4],
        {"measure": "cost_per_correct_usd", "step": 4, "value": 0.1},
    )
    assert evaluations(None, 0.3, None, 0.4) == (
        [4],
        {"measure": "cost_per_correct_usd", "step": 4, "value": 0.3},
    )
    assert (
        evaluations(
            0.2, 0.3, 0.3, 0.3, best={"measure": "cost_per_correct_usd", "step": 1, "value": 0.2}
        )[0]
        == []
    )  # resumed: the one before stays
    assert asked[0] == [
        "held_out-5",
        "held_out-6",
        "held_out-7",
    ]  # not those of the evaluations before and after


def test_the_trainers_log_probabilities_reach_the_trajectories_from_all_ranks():
    import types

    import train as program
    from nanorchestra.records import Trajectory, Turn

    def trajectory(*contexts):
        turns = [Turn(start, start + 1, "", context=begin) for begin, start in contexts]
        return Trajectory("t", 0, 1, [5, 6, 7], [False, True, True], [], [], turns)

    whole, turns, other = trajectory((0, 1)), trajectory((0, 1), (1, 2)), trajectory((0, 1))
    elsewhere = types.SimpleNamespace(
        ranks=types.SimpleNamespace(gather=lambda mine: [mine, {2: [-3.5]}])
    )  # a second rank had the second turn
    logprobs = [[[-1.5, -2.5], [-3.0], None], [[-4.0]]]
    program.Training._note_logprobs(elsewhere, [[whole, turns], [other]], logprobs, [whole, turns])
    assert (
        whole.trainer_logprobs == [-1.5, -2.5]
        and turns.trainer_logprobs == [-3.0, -3.5]
        and other.trainer_logprobs == []
    )


def test_the_engines_copy_is_never_in_float32_nor_used_without_weights(make_training, monkeypatch):
    import torch

    import train as program
    from nanorchestra.model.packed_attention import Segment, packed_attention
    from nanorchestra.model.qwen3 import Qwen3
    from nanorchestra.model.weights import copy_weights, named_hf_tensors

    built = []

    class Watched(Qwen3):
        def __init__(self, config):
            super().__init__(config)
            built.append(self.norm.device.type)

    monkeypatch.setattr(program, "Qwen3", Watched)
    training = make_training("run", "--run.dtype", "bfloat16")
    assert set(built) == {"meta"} and {
        (p.dtype, p.device.type) for p in training.engine.model.parameters()
    } == {(torch.bfloat16, "cpu")}
    plain = Qwen3(training.engine.config).bfloat16()
    copy_weights(plain, named_hf_tensors(training.trainer.model))
    ids = torch.arange(300)
    ours, theirs = (
        model(ids, ids, packed_attention([Segment(0, 300)]))
        for model in (training.engine.model, plain)
    )
    assert torch.equal(ours, theirs)  # rotations too
    training.engine.weight_version = 0
    with pytest.raises(RuntimeError, match="weights are not set"):
        training._rollout(1.0)


# Several ranks. They start from the bundled model, whose attempts differ in their rewards, so that GRPO has something to do.

REAL = [
    "--model.path",
    "assets/nano",
    "--run.threads",
    "1",
    "--run.checkpoint_every",
    "2",
    "--warm_start.steps",
    "1",
    "--warm_start.prompts",
    "3",
    "--grpo.steps",
    "5",
    "--grpo.prompts",
    "3",
    "--grpo.group_size",
    "4",
    "--grpo.bounds",
    "task",
    "--grpo.optimizer",
    "muon",
    "--grpo.kl_coef",
    "0.1",
    "--evaluation.tasks",
    "3",
    "--rollout.turns",
    "2",
    "--rollout.turn_tokens",
    "64",
]


@pytest.mark.slow
def test_evaluations_on_the_way_change_nothing_and_come_back_the_same_in_a_resumed_run(tmp_path):
    fresh = [
        *REAL,
        "--run.root",
        tmp_path,
        "--rollout.overlap",
        "false",
        "--grpo.importance_cap",
        "0",
        "--run.record_groups",
        "3",
    ]
    code, out = train(*fresh, "--run.name", "plain")
    assert code == 0, out
    arguments = [*fresh, "--evaluation.every", "2", "--evaluation.every_tasks", "4"]
    code, out = train(*arguments, "--run.name", "straight")
    assert code == 0, out
    straight, log = tmp_path / "straight", tmp_path / "cut" / "metrics.jsonl"
    cut = train(*arguments, "--run.name", "cut", wait=False)
    wait_for(cut, log, "evaluation", 2)
    cut.kill()
    cut.communicate(timeout=100)
    code, out = train("--resume", tmp_path / "cut")
    assert code == 0, out
    assert rows(tmp_path / "cut") == rows(straight) and final(tmp_path / "cut") == final(straight)
    assert [row for row in rows(straight) if row["phase"] != "evaluation"] == rows(
        tmp_path / "plain"
    ) and final(straight) == final(tmp_path / "plain")
    evaluations = {
        row["step"]: row["reward"] for row in rows(straight) if row["phase"] == "evaluation"
    }
    assert list(evaluations) == [2, 4, 5]
    step = max(evaluations, key=evaluations.get)
    for run in (straight, tmp_path / "cut"):
        assert json.loads((run / "model-best.json").read_text()) == {
            "measure": "reward",
            "step": step,
            "value": evaluations[step],
        }
        assert (run / "model-best" / "model.safetensors").read_bytes() == (
            straight / "model-best" / "model.safetensors"
        ).read_bytes()
    trained = [
        row
        for row in map(json.loads, (straight / "trajectories.jsonl").open())
        if row["trainer_logprobs"]
    ]
    assert trained  # sampler and trainer agree id by id
    for row in trained:
        drawn = [logprob for logprob, sampled in zip(row["logprobs"], row["sampled"]) if sampled]
        assert row["trainer_logprobs"] == pytest.approx(drawn, abs=1e-4)


def torchrun(*arguments, nodes=1, node=0, port=0, ranks=2, restarts=0):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes}",
        f"--node-rank={node}",
        f"--nproc-per-node={ranks}",
        "--master-addr=127.0.0.1",
        f"--master-port={port or free_port()}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.2",
        "train.py",
        *map(str, arguments),
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(process, log, phase, step):
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and not (
        log.exists()
        and any(f'"{phase}", "step": {step},' in line for line in log.read_text().splitlines())
    ):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)


@pytest.mark.slow
def test_one_of_two_ranks_is_killed_or_asked_to_stop_and_the_run_ends_the_same(tmp_path):
    straight = torchrun(*REAL, "--run.root", tmp_path, "--run.name", "straight")
    out, _ = straight.communicate(timeout=500)
    assert straight.returncode == 0, out
    run = tmp_path / "straight"
    assert any(row.get("grad_norm", 0) > 0 for row in rows(run) if row["phase"] == "grpo")

    log = tmp_path / "cut" / "metrics.jsonl"
    cut = torchrun(*REAL, "--run.root", tmp_path, "--run.name", "cut", restarts=1)
    wait_for(cut, log, "grpo", 2)
    os.kill(
        children(cut.pid)[1], signal.SIGKILL
    )  # torchrun starts the same command again by itself
    wait_for(cut, log, "grpo", 4)
    os.kill(children(cut.pid)[1], signal.SIGTERM)  # rank 1 alone is asked
    out, _ = cut.communicate(timeout=500)
    assert cut.returncode == 0 and out.count("resuming") == 1, out
    if not (tmp_path / "cut" / "summary.json").exists():  # asked too late, it may have ended
        assert "stopped at grpo step" in out
        again = torchrun("--resume", tmp_path / "cut")
        out, _ = again.communicate(timeout=500)
        assert again.returncode == 0, out
    assert rows(tmp_path / "cut") == rows(run) and final(tmp_path / "cut") == final(run)


@pytest.mark.slow
def test_two_ranks_train_adapters_of_a_base_in_bf16(tmp_path):
    import torch
    from torch.distributed.checkpoint import FileSystemReader

    options = [
        "--run.root",
        tmp_path,
        "--run.name",
        "run",
        "--run.dtype",
        "bfloat16",
        "--lora.rank",
        "4",
        "--grpo.steps",
        "2",
        "--parallel.cpu_offload",
        "true",
    ]
    both = torchrun(*REAL, *options)
    out, _ = both.communicate(timeout=500)
    assert both.returncode == 0, out
    assert any(
        row.get("grad_norm", 0) > 0 for row in rows(tmp_path / "run") if row["phase"] == "grpo"
    )
    saved = (
        FileSystemReader(sorted((tmp_path / "run" / "checkpoints").iterdir())[-1])
        .read_metadata()
        .state_dict_metadata
    )
    held = {
        (name.endswith(("lora_a", "lora_b")), entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith("model.")
    }
    assert held == {(False, torch.bfloat16), (True, torch.float32)}


@pytest.mark.slow
def test_the_configs_of_big_runs_pass_a_dry_run_on_two_nodes_of_one_rank(tmp_path):
    for config in ("qwen3-8b", "qwen3-8b-multinode"):
        port = free_port()
        nodes = [
            torchrun(
                "--config",
                f"configs/{config}.toml",
                "--dry-run",
                "--run.root",
                tmp_path,
                nodes=2,
                node=node,
                port=port,
                ranks=1,
            )
            for node in (0, 1)
        ]
        outs = [node.communicate(timeout=500)[0] for node in nodes]
        assert all(node.returncode == 0 for node in nodes), outs
        run = tmp_path / f"{config}-dry-run"
        assert (
            any(row.get("grad_norm", 0) > 0 for row in rows(run))
            and (run / "model" / "model.safetensors").exists()
        )
