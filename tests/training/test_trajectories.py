"""Recorded attempts: rows of JSON bring them back, and what of them is learnt."""

from __future__ import annotations

import json
import types

import pytest

from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Trajectory, Turn
from nanorchestra.training.distributed import Ranks
from nanorchestra.training.grpo import as_group
from nanorchestra.training.packing import pack
from nanorchestra.training.progress import Progress, TrainingRun
from nanorchestra.training.trajectories import from_row

CALL = ToolCall("echo", {"text": "hi"})


def made(tokenizer, rebuilt):
    """An attempt of two turns: one growing session, or a prompt for each turn."""
    t = Trajectory("t0", 0, reward=0.5, answer="42", outcome=1.0)
    known = "What is it? It is 42." if rebuilt else "It is 42."
    for given, text in (("What is it?", "I look it up."), (known, t.answer)):
        context = len(t.ids) if rebuilt else 0
        t.ids += tokenizer.encode(given)
        t.prompt_length = t.prompt_length or len(t.ids)
        turn = tokenizer.encode(text)
        t.turns.append(Turn(len(t.ids), len(t.ids) + len(turn), "stop", context=context))
        t.sampled += [False] * (len(t.ids) - len(t.sampled)) + [True] * len(turn)
        t.ids += turn
    t.turns[0].calls, t.turns[0].results = [CALL], [ToolResult("It is 42.", 0.1)]
    t.logprobs = [-1.0 if sampled else 0.0 for sampled in t.sampled]
    return t


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_row_brings_the_trajectory_back_and_only_sampled_ids_are_learnt(nano_tokenizer, rebuilt):
    trajectory, rows = made(nano_tokenizer, rebuilt), []
    run = types.SimpleNamespace(
        ranks=Ranks(),
        engine=types.SimpleNamespace(tokenizer=nano_tokenizer),
        progress=Progress(step=3),
        folder=types.SimpleNamespace(append=lambda log, row: rows.append(row)),
    )
    task = Task(trajectory.task_id, "question?", Preference(), kind="lookup")
    TrainingRun.record_attempts(run, "grpo", [task], [trajectory])
    (row,) = rows
    assert from_row(json.loads(json.dumps(row)))[1] == trajectory
    assert [part["role"] for part in row["text"]] == ["assistant", "tool", "assistant"]
    group = as_group([trajectory])
    assert len(group.samples) == 1 + rebuilt and group.shared == trajectory.prompt_length
    assert group.tokens == len(trajectory.ids) - rebuilt * group.shared
    packed, places = pack([group]), [i for i, s in enumerate(trajectory.sampled) if s]
    assert packed.targets.tolist() == [trajectory.ids[i] for i in places]
    assert packed.tokens[packed.source].tolist() == [trajectory.ids[i - 1] for i in places]


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_badly_formed_turn_leaves_the_loss_alone_the_others_stay(nano_tokenizer, rebuilt):
    t = made(nano_tokenizer, rebuilt)
    bad, good = t.turns
    bad.well_formed = False
    (sample,) = as_group([t], drop_invalid_format=True).samples
    kept = [x for x, in_loss in zip(sample.ids, sample.loss_mask, strict=True) if in_loss]
    assert kept == t.ids[good.start : good.end]
    assert sum(s.loss_ids for s in as_group([t]).samples) == sum(t.sampled)
