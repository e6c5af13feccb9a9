"""Recorded trajectories as examples: which are kept and why others are not, what a bad file gets, and that only sampled ids are learnt from."""

from __future__ import annotations

import json
import types
from collections import Counter

import pytest
from test_agent import ANSWER, call, run
from test_rebuild import attempt, echoing

import train as program
from nanorchestra.config import load_config
from nanorchestra.errors import UserError
from nanorchestra.model.tokenizer import train_bpe
from nanorchestra.records import Preference, Task
from nanorchestra.training.packing import Group, pack
from nanorchestra.training.ranks import Ranks
from nanorchestra.training.trajectories import load_kept, parts, take


def recorded(tokenizer, trajectory, phase="grpo"):
    """The row that train.py writes."""
    rows = []
    house = types.SimpleNamespace(
        ranks=Ranks(), step=3, tokenizer=tokenizer, _append=lambda log, row: rows.append(row)
    )
    program.Training._record(
        house,
        phase,
        Task(trajectory.task_id, "question?", Preference(), {"kind": "lookup", "tools": []}),
        trajectory,
    )
    return json.loads(json.dumps(rows[0]))


def made(tokenizer, task="t0", reward=0.5, answer="42", rebuilt=False, **changes):
    script = [call("hi"), ANSWER.replace("42", answer)]
    trajectory = (
        attempt(tokenizer, echoing(), script)[0] if rebuilt else run(tokenizer, script)[0][0]
    )
    trajectory.task_id, trajectory.reward = task, reward
    for name, value in changes.items():
        setattr(trajectory, name, value)
    return trajectory


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path, tokenizer, outcome=1.0, reward=0.0, best=0, longest=9999):
    return load_kept([path], tokenizer, outcome=outcome, reward=reward, best=best, longest=longest)


def test_what_is_kept_and_why_the_rest_is_not(nano_tokenizer, tmp_path):
    t = lambda **changes: made(nano_tokenizer, **changes)  # noqa: E731
    rows = [
        recorded(nano_tokenizer, trajectory, phase)
        for phase, trajectory in (
            ("grpo", t(reward=0.3)),
            ("grpo", t(reward=0.3)),
            ("grpo", t(reward=0.9, answer="42 ", outcome=1.0)),
            ("grpo", t(reward=0.6, answer=" 42", outcome=1.0)),
            ("grpo", t(reward=0.9, answer="41")),
            ("grpo", t(task="t1", reward=0.1)),
            ("grpo", t(task="t1", reward=0.9, status="token_limit")),
            ("grpo", t(task="t1", well_formed=False)),
            ("before", t(task="t2")),
            ("after", t(task="t2")),
            ("skipped", t(task="t2")),
            ("rollouts", t(task="t3", reward=0.7)),
        )
    ]
    kept, reasons = load(write(tmp_path / "f", rows), nano_tokenizer, reward=0.2, best=2)
    assert [[(member.task_id, member.reward) for member in members] for members in kept] == [
        [("t0", 0.9), ("t0", 0.6)],
        [("t3", 0.7)],
    ]
    assert reasons == Counter(
        {
            "of an evaluation or a skipped step": 3,
            "cut or badly formed": 2,
            "wrong": 1,
            "the same again": 1,
            "reward below 0.2": 1,
            "not of the best 2 of their task": 1,
        }
    )
    assert sum(map(len, kept)) + sum(reasons.values()) == len(rows)
    kept, reasons = load(tmp_path / "f", nano_tokenizer, outcome=0.0)
    assert [len(members) for members in kept] == [4, 1, 1] and "wrong" not in reasons
    with pytest.raises(
        UserError,
        match=r"none of 12 trajectories is kept \(.*8 reward below 0.95.*\)|none of 12 .*reward below 0.95",
    ):
        load(tmp_path / "f", nano_tokenizer, reward=0.95)
    long = rows[-1]
    assert (
        len(load(write(tmp_path / "g", [long]), nano_tokenizer, longest=len(long["ids"]))[0]) == 1
    )
    with pytest.raises(UserError, match=f"1 longer than {len(long['ids']) - 1} tokens"):
        load(tmp_path / "g", nano_tokenizer, longest=len(long["ids"]) - 1)


def test_what_is_kept_is_what_was_sampled(nano_tokenizer, tmp_path):
    """To the id, and only sampled ids are targets; of a growing session and of one whose turns have prompts of their own."""
    for rebuilt in (False, True):
        trajectory = made(nano_tokenizer, rebuilt=rebuilt)
        directory = tmp_path / str(rebuilt)
        directory.mkdir()
        write(directory / "trajectories.jsonl", [recorded(nano_tokenizer, trajectory)])
        (kept,), _ = load(directory, nano_tokenizer)
        group = Group.of([part for member in kept for part in parts(member)])
        packed = pack([group])
        sampled = [
            token for token, is_sampled in zip(trajectory.ids, trajectory.sampled) if is_sampled
        ]
        assert packed.targets.tolist() == sampled and group.sampled == len(sampled)
        assert [packed.tokens[at].item() for at in packed.source] == [
            trajectory.ids[i - 1] for i, is_sampled in enumerate(trajectory.sampled) if is_sampled
        ]


def without(name):
    return lambda row: row.pop(name)


BAD = {
    "no ids": (without("ids"), r"ids is null; it must be a list"),
    "no phase": (without("phase"), r"phase is null; it must be text"),
    "a reward in words": (
        lambda row: row.update(reward="high"),
        r'reward is "high"; it must be a number',
    ),
    "a reward that is true": (
        lambda row: row.update(reward=True),
        r"reward is true; it must be a number",
    ),
    "an id of another vocabulary": (
        lambda row: row["ids"].__setitem__(5, 151_000),
        r"ids has 151000; this model's tokenizer has the ids 0 to \d+",
    ),
    "a negative id": (lambda row: row["ids"].__setitem__(5, -1), r"ids has -1;"),
    "half an id": (lambda row: row["ids"].__setitem__(5, 1.5), r"ids has 1.5;"),
    "a given id as sampled": (
        lambda row: row["sampled"].__setitem__(row["turns"][0]["end"], True),
        r"sampled has \d+ entries, \d+ true; it must be true for the \d+ ids of the turns",
    ),
    "an id of the prompt as sampled": (
        lambda row: row["sampled"].__setitem__(0, True),
        r"sampled has",
    ),
    "too short a mask": (lambda row: row["sampled"].pop(), r"sampled has"),
    "a turn out of bounds": (
        lambda row: row["turns"][1].update(end=99_999),
        r'turns\[1\] is \{"start"',
    ),
    "turns out of order": (lambda row: row["turns"].reverse(), r"turns\[1\] is"),
    "a turn in the prompt": (
        lambda row: row["turns"][0].update(start=row["prompt_length"] - 1),
        r"turns\[0\] is",
    ),
    "no turn": (lambda row: row["turns"].__setitem__(0, 7), r"turns\[0\] is 7"),
    "a context after its turn": (
        lambda row: row["turns"][0].update(context=99_999),
        r"turns\[0\] is",
    ),
    "another text": (
        lambda row: row["text"][0].update(text="something else"),
        r'turn 0 reads ".*" in this model\'s tokenizer and "something else" in the file; .*model.path',
    ),
    "a text missing": (
        lambda row: row["text"].clear(),
        r'turn 0 reads ".*" in this .* and "" in the file',
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_row_gets_one_line_with_its_number(nano_tokenizer, tmp_path, what):
    spoil, says = BAD[what]
    rows = [recorded(nano_tokenizer, made(nano_tokenizer, task=f"t{i}")) for i in range(3)]
    spoil(rows[1])
    with pytest.raises(UserError, match=f"^{tmp_path / 'f'}, line 2: {says}") as error:
        load(write(tmp_path / "f", rows), nano_tokenizer)
    assert "\n" not in str(error.value)


def test_bad_files(nano_tokenizer, tmp_path):
    row = json.dumps(recorded(nano_tokenizer, made(nano_tokenizer)))
    for text, says in (
        (f"{row}\n{{\n{row}\n", "line 2: not JSON"),
        (f"{row}\n[1]\n", "line 2: list; a line must be the JSON object of a trajectory"),
        ("", "none of 0 trajectories is kept"),
        ("\ufeffx\n", "line 1: not JSON"),
    ):
        (tmp_path / "f").write_text(text)
        with pytest.raises(UserError, match=says):
            load(tmp_path / "f", nano_tokenizer)
    (tmp_path / "f").write_text(f"{row}\n{row[:99]}")  # its writer was killed, or is still writing
    assert len(load(tmp_path / "f", nano_tokenizer)[0]) == 1
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            UserError,
            match=r"cannot be read \(No such file or directory\); warm_start.trajectories takes runs",
        ):
            load(path, nano_tokenizer)


def test_another_tokenizer_of_the_same_size_is_noticed(nano_tokenizer, tmp_path):
    write(tmp_path / "f", [recorded(nano_tokenizer, made(nano_tokenizer))])
    other = train_bpe(
        ["a quite different text, of other words and letters altogether; " * 9],
        nano_tokenizer.vocab_size,
    )
    with pytest.raises(UserError, match="line 1: (turn 0 reads|ids has)"):
        load(tmp_path / "f", other)


def test_all_come_once_before_any_comes_again_and_a_step_can_be_taken_again():
    items = list("abcdefg")
    row = [x for step in range(7) for x in take(items, step * 3, 3, seed=1)]
    assert all(sorted(row[i : i + 7]) == items for i in (0, 7, 14)) and row[:7] != row[7:14]
    assert take(items, 5, 20, 1) == take(items, 0, 25, 1)[5:] and take(items, 0, 7, 1) != take(
        items, 0, 7, 2
    )


def test_train_takes_several_files_and_says_what_it_kept(nano_tokenizer, tmp_path, capsys):
    for name in "ab":
        write(
            tmp_path / name,
            [
                recorded(nano_tokenizer, made(nano_tokenizer, task=name)),
                recorded(nano_tokenizer, made(nano_tokenizer, task=name, answer="41")),
            ],
        )
    config = load_config(
        None,
        [
            "--warm_start.trajectories",
            f"{tmp_path / 'a'}, {tmp_path / 'b'}",
            "--rollout.context",
            "rebuild",
        ],
    )
    house = types.SimpleNamespace(config=config, tokenizer=nano_tokenizer, ranks=Ranks())
    assert [members[0].task_id for members in program.Training._examples(house)] == ["a", "b"]
    assert (
        capsys.readouterr().out
        == "warm start on 2 recorded trajectories of 2 tasks; not kept: 2 wrong\n"
    )
    house.config = load_config(None, ["--rollout.context", "rebuild"])
    assert program.Training._examples(house) == []
