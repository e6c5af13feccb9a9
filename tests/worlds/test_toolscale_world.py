"""Tools as data, the databases they work on, and the built-in author of domains."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest

from nanorchestra.errors import UserError
from worlds.toolscale.domains import BUILT_IN, HOME, build, load_blueprint
from worlds.toolscale.program import ToolError, calculate, check_tool, database_hash, run
from worlds.toolscale.world import World, check_schema, row_problems

DATA = Path(__file__).parents[3] / "shared" / "data"
SCHEMA = {
    "shelves": {
        "key": "shelf",
        "fields": {
            "shelf": {"type": "string"},
            "room": {"type": "string", "enum": ["hall", "attic"]},
        },
    },
    "books": {
        "key": "book",
        "fields": {
            "book": {"type": "string"},
            "shelf": {"type": "string", "link": "shelves"},
            "pages": {"type": "integer"},
            "price": {"type": "number"},
        },
    },
}


def library():
    return {
        "shelves": {"S1": {"shelf": "S1", "room": "hall"}},
        "books": {
            f"B{n}": {"book": f"B{n}", "shelf": "S1", "pages": 100 * n, "price": 2.5 * n}
            for n in (1, 2, 3)
        },
    }


def tool(*program, kind="write", **parameters):
    return {
        "kind": kind,
        "function": {
            "name": "t",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {k: {"type": v} for k, v in parameters.items()},
            },
        },
        "program": list(program),
    }


def give(value):
    return {"op": "return", "value": value}


# --- the interpreter


def test_reads_select_order_project_and_aggregate():
    rows = {
        "op": "select",
        "table": "books",
        "where": [["pages", ">", "$least"], ["shelf", "==", "S1"]],
        "fields": ["book", "price"],
        "order": "price",
        "as": "rows",
    }
    total = {"op": "aggregate", "function": "sum", "rows": "$rows", "field": "price", "as": "total"}
    assert run(
        tool(
            rows,
            total,
            give({"object": {"rows": "$rows", "total": "$total", "first": "$rows"}}),
            kind="read",
            least="integer",
        ),
        {"least": 100},
        library(),
    ) == {
        "rows": [{"book": "B2", "price": 5.0}, {"book": "B3", "price": 7.5}],
        "total": 12.5,
        "first": [{"book": "B2", "price": 5.0}, {"book": "B3", "price": 7.5}],
    }
    for function, value in (("count", 2), ("mean", 6.25), ("min", 5.0), ("max", 7.5)):
        assert (
            run(
                tool(rows, total | {"function": function}, give("$total"), least="integer"),
                {"least": 100},
                library(),
            )
            == value
        )
    assert (
        run(
            tool(
                {
                    "op": "find",
                    "table": "books",
                    "where": [["pages", "in", [200, 999]]],
                    "as": "b",
                    "error": "no",
                },
                give("$b.book"),
            ),
            {},
            library(),
        )
        == "B2"
    )
    with pytest.raises(ToolError, match="^no$"):  # find wants exactly one
        run(
            tool({"op": "find", "table": "books", "where": [], "as": "b", "error": "no"}),
            {},
            library(),
        )


def test_writes_insert_update_delete_and_compute():
    tables = library()
    insert = {
        "op": "insert",
        "table": "books",
        "key": "$id",
        "record": {
            "book": "$id",
            "shelf": "S1",
            "pages": {"-": [{"+": [4, 5]}, 1]},
            "price": {"round": [{"/": [10, 3]}, 2]},
        },
    }
    assert (
        run(
            tool(
                {"op": "compute", "as": "id", "value": {"next_id": ["books", "B"]}},
                insert,
                give("$id"),
            ),
            {},
            tables,
        )
        == "B4"
    )
    assert tables["books"]["B4"] == {"book": "B4", "shelf": "S1", "pages": 8, "price": 3.33}
    before = tables["books"]["B1"]
    run(
        tool(
            {
                "op": "update",
                "table": "books",
                "key": "B1",
                "set": {"pages": {"*": [2, {"lookup": ["$size", {"big": 50, "small": 1}]}]}},
            },
            size="string",
        ),
        {"size": "big"},
        tables,
    )
    assert (
        tables["books"]["B1"]["pages"] == 100
        and before["pages"] == 100
        and tables["books"]["B1"] is not before
    )  # records are never changed in place
    run(tool({"op": "delete", "table": "books", "key": "B2"}), {}, tables)
    assert list(tables["books"]) == ["B1", "B3", "B4"]


@pytest.mark.parametrize(
    "last",
    [
        {"op": "require", "if": [1, "==", 2], "error": "a rule"},
        {"op": "delete", "table": "books", "key": "B9"},
        {"op": "insert", "table": "books", "key": "B1", "record": {}},
        {"op": "compute", "as": "x", "value": {"/": [1, 0]}},
        {"op": "compute", "as": "x", "value": {"+": ["a", 1]}},
        {"op": "compute", "as": "x", "value": {"lookup": ["a", {}]}},
        give("$books.x"),
    ],
)
def test_a_call_that_fails_changes_nothing_not_even_the_order(last):
    tables = library()
    writes = [
        {"op": "delete", "table": "books", "key": "B2"},
        {"op": "update", "table": "books", "key": "B1", "set": {"pages": 1}},
        {
            "op": "insert",
            "table": "books",
            "key": "B7",
            "record": {"book": "B7", "shelf": "S1", "pages": 1, "price": 1.0},
        },
        {"op": "delete", "table": "books", "key": "B7"},
        {"op": "update", "table": "books", "key": "B1", "set": {"pages": 2}},
    ]
    with pytest.raises(ToolError):
        run(tool(*writes, last), {}, tables)
    assert json.dumps(tables) == json.dumps(library())


def test_an_error_text_names_its_variables():
    with pytest.raises(ToolError, match="^B1 has 100 pages, not 7.$"):
        run(
            tool(
                {"op": "get", "table": "books", "key": "B1", "as": "b", "error": "?"},
                {
                    "op": "require",
                    "if": ["$b.pages", "==", "$n"],
                    "error": "{b.book} has {b.pages} pages, not {n}.",
                },
            ),
            {"n": 7},
            library(),
        )


def test_the_calculator_agrees_with_python_and_refuses_the_rest():
    rng = random.Random(5)
    for _ in range(300):
        numbers = [
            rng.choice((str(rng.randint(1, 99)), f"{rng.uniform(0.1, 9):.2f}")) for _ in range(4)
        ]
        text = f"{numbers[0]} {rng.choice('+-*/')} ({numbers[1]} {rng.choice('+*/')} {numbers[2]}) {rng.choice('+-*')} {numbers[3]}"
        assert calculate(text) == round(eval(text), 2)
    assert calculate("1,000 * 3") == 3000
    for bad in (
        "2 ** 9",
        "7 // 2",
        "__import__('os')",
        "a + 1",
        "1 +",
        "",
        "(" * 150,
        "1 / 0",
        "1" * 201,
        "1 2",
        "(1, 2)",
        "9e9",
    ):
        with pytest.raises(ToolError):
            calculate(bad)


@pytest.mark.parametrize(
    "step, says",
    [
        ({"op": "grab", "table": "books"}, "op is 'grab'"),
        ({"op": "get", "table": "cups", "key": "$n", "as": "x", "error": ""}, "no table 'cups'"),
        (
            {"op": "select", "table": "books", "where": [["colour", "==", 1]], "as": "x"},
            "no field 'colour'",
        ),
        (
            {"op": "select", "table": "books", "where": [["pages", "~", 1]], "as": "x"},
            "comparison is '~'",
        ),
        (
            {"op": "get", "table": "books", "key": "$m", "as": "x", "error": ""},
            "no argument or variable 'm'",
        ),
        ({"op": "compute", "as": "x", "value": {"power": [1, 2]}}, "unknown operation 'power'"),
        (
            {"op": "update", "table": "books", "key": "B1", "set": {"colour": 1}},
            "no field 'colour'",
        ),
        ({"op": "insert", "table": "books", "key": "B1", "record": {"book": "B1"}}, "lacks"),
        ({"op": "require", "if": [1, "==", 1]}, "needs 'error'"),
        ({"op": "return", "value": 1, "when": 2}, "no setting 'when'"),
        ({"op": "require", "if": [1, "==", 1], "error": "{what}"}, "'what'"),
        ({"op": "aggregate", "function": "sum", "rows": "$n", "as": "x"}, "need a field"),
        (["get"], "step 0"),
        ({"op": "require", "if": [1, "=="], "error": ""}, "step 0"),
    ],
)
def test_a_program_with_something_unknown_is_refused_and_the_step_named(step, says):
    with pytest.raises(UserError, match="library: t: step 0") as caught:
        check_tool(tool(step, n="string"), SCHEMA, "library")
    assert says in str(caught.value)


def test_a_variable_has_only_the_fields_of_its_table_and_a_read_writes_nothing():
    get = {"op": "get", "table": "books", "key": "B1", "as": "b", "error": ""}
    check_tool(tool(get, give("$b.pages")), SCHEMA, "library")
    with pytest.raises(UserError, match="no field 'colour'"):
        check_tool(tool(get, give("$b.colour")), SCHEMA, "library")
    with pytest.raises(UserError, match="kind is read"):
        check_tool(
            tool({"op": "delete", "table": "books", "key": "B1"}, kind="read"), SCHEMA, "library"
        )


# --- databases


@pytest.mark.parametrize(
    "name", ["toolscale/movie", "toolscale/weather", "tau2/retail", "tau2/mock"]
)
def test_published_databases_load_and_hash_the_same_in_any_order_of_keys(name):
    if not (DATA / name / "db.json").exists():
        pytest.skip("no shared data")
    world = World.load(DATA / name)

    def shuffled(value, rng):
        if isinstance(value, dict):
            return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}
        return [shuffled(inner, rng) for inner in value] if isinstance(value, list) else value

    mixed = shuffled(world.tables, random.Random(1))
    assert json.dumps(mixed) != json.dumps(world.tables)
    assert (
        database_hash(mixed)
        == database_hash(world.tables)
        == world.hash(mixed)
        == world.hash(world.fresh())
    )
    table, key = next((t, next(iter(rows))) for t, rows in mixed.items() if rows)
    mixed[table][key] = mixed[table][key] | {"new": 1}
    assert database_hash(mixed) != database_hash(world.tables) and world.hash(
        mixed
    ) == database_hash(mixed)


def test_what_json_cannot_hold_has_no_hash():
    for value in (float("nan"), {1, 2}):
        with pytest.raises(UserError, match="not JSON"):
            database_hash({"t": {"k": {"v": value}}})


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda t: t["books"]["B1"].pop("pages"), "'pages' is missing"),
        (lambda t: t["books"]["B1"].update(colour=1), "'colour'"),
        (lambda t: t["books"]["B1"].update(pages="many"), "must be a integer"),
        (lambda t: t["books"]["B1"].update(pages=True), "must be a integer"),
        (lambda t: t["books"]["B1"].update(shelf="S9"), "no such record in shelves"),
        (lambda t: t["shelves"]["S1"].update(room="cellar"), "must be one of hall, attic"),
        (lambda t: t["books"]["B1"].update(book="B2"), "must be the key"),
        (lambda t: t["books"].update(B1=3), "must be an object"),
    ],
)
def test_a_row_that_breaks_the_schema_or_a_link_is_named(change, says):
    tables = library()
    assert not row_problems(SCHEMA, tables)
    change(tables)
    (problem,) = row_problems(SCHEMA, tables).values()
    assert says in problem


def test_a_dangling_link_of_a_schema_is_refused():
    broken = copy.deepcopy(SCHEMA)
    broken["books"]["fields"]["shelf"]["link"] = "racks"
    with pytest.raises(UserError, match=r"books.shelf: it links to table 'racks'"):
        check_schema(broken, "library")


# --- the built-in author


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_domain_is_as_large_as_promised_and_sound(name):
    for seed in (0, 1, 2):
        world, _ = build(name, seed)
        world.check()
        kinds = [t["kind"] for t in world.tools]
        assert (
            len(world.tables) >= 3
            and sum(map(len, world.tables.values())) >= 200
            and len(world.tools) >= 12
        )
        assert (
            kinds.count("calculate") == kinds.count("handover") == 1
            and kinds.count("read") >= 3
            and kinds.count("write") >= 3
        )
        assert (
            sum(
                "link" in spec
                for shape in world.schema.values()
                for spec in shape["fields"].values()
            )
            >= 3
        )
        for t in world.tools:
            assert t["function"]["name"] in world.policy
            for step in t["program"]:
                assert (
                    step.get("rule", "") in world.policy
                )  # the policy says what the preconditions enforce


def test_another_seed_gives_other_names_fields_tools_rules_and_data():
    a, _ = build("railway", 1)
    assert (
        build.__wrapped__("railway", 1)[0].tables == a.tables
        and build.__wrapped__("railway", 1)[0].tools == a.tools
    )
    worlds = [build("railway", seed) for seed in range(8)]
    assert (
        len({tuple(w.tables) for w, _ in worlds}) > 1
        and len({tuple(sorted(w.by_name)) for w, _ in worlds}) > 3
    )
    assert (
        len({json.dumps(w.schema) for w, _ in worlds})
        == len({w.policy for w, _ in worlds})
        == len({json.dumps(w.tables) for w, _ in worlds})
        == 8
    )
    assert len({json.dumps(vars(words.rules)) for _, words in worlds}) > 6


def test_a_new_domain_is_one_file_and_a_bad_one_is_named(tmp_path):
    blueprint = json.loads((HOME / "railway.json").read_text()) | {
        "domain": "ferries",
        "business": "a ferry line",
    }
    path = tmp_path / "ferries.json"
    path.write_text(json.dumps(blueprint))
    world, _ = build(str(path), 3)
    assert world.domain == "ferries" and len(world.tools) >= 12
    for change, says in (
        (
            lambda b: b["ask"].update(cancel=["cancel {ticket}"]),
            r"ask.cancel: 'cancel \{ticket\}' must hold exactly \{deal\}",
        ),
        (lambda b: b.pop("item"), "item is None"),
        (lambda b: b["deal"].update(prefix="P"), "prefix"),
        (lambda b: b["extra"].update(topic=[]), "topic is"),
    ):
        bad = copy.deepcopy(blueprint)
        change(bad)
        path.write_text(json.dumps(bad))
        with pytest.raises(UserError, match=says):
            load_blueprint(str(path))
    path.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_blueprint(str(path))
    with pytest.raises(UserError, match="there are finance"):
        load_blueprint("ferry")


def test_a_world_is_written_and_read_back_and_a_broken_one_refused(tmp_path):
    world, _ = build("travel", 0)
    world.save(tmp_path / "travel")
    again = World.load(tmp_path / "travel")
    assert (again.tables, again.tools, again.schema, again.policy) == (
        world.tables,
        world.tools,
        world.schema,
        world.policy,
    )
    db = tmp_path / "travel" / "db.json"
    table = next(iter(world.tables))
    db.write_text(json.dumps(world.tables | {table: {"X1": {"x": 1}}}))
    with pytest.raises(UserError, match=f"travel: db: {table} X1"):
        World.load(tmp_path / "travel")
    db.write_text(db.read_text()[:-20])
    with pytest.raises(UserError, match="db.json: not JSON"):
        World.load(tmp_path / "travel")
