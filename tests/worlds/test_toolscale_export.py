"""A directory of data_gen.py as a domain of tau2-bench."""

from __future__ import annotations

import json

import pytest

from worlds.toolscale.blueprint import build
from worlds.toolscale.export import environment, tasks
from worlds.toolscale.pipeline import make_batch


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    build("railway", 2)[0].save(out / "worlds" / "railway")
    rows = make_batch(2, (1, 3), "railway", 0)["tasks"]
    (out / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return out


def test_tasks_have_the_fields_of_tau2_and_reads_are_free(made):
    for row in tasks(made, "railway"):
        assert {*row} == {"id", "user_scenario", "evaluation_criteria", "description"}
        assert "ACTION" not in row["evaluation_criteria"]["reward_basis"]
    assert not tasks(made, "bank")


def test_the_environment_of_tau2_executes_our_programs(made):
    pytest.importorskip("tau2.environment.environment")
    for row in tasks(made, "railway"):
        env = environment(made, "railway")
        before = env.get_db_hash()
        for action in row["evaluation_criteria"]["actions"]:
            env.make_tool_call(action["name"], requestor="assistant", **action["arguments"])
        writes = [
            env.tools.tool_type(a["name"]).value for a in row["evaluation_criteria"]["actions"]
        ]
        assert (env.get_db_hash() != before) == ("write" in writes)
