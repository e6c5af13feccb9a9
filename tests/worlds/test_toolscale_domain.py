"""Tools as data, the tables they work on, and worlds built from blueprints."""

from __future__ import annotations

import copy
import json
import random

import pytest

from nanorchestra.errors import UserError
from worlds.toolscale.act import Act, UnfitError
from worlds.toolscale.blueprint import BUILT_IN, HOME, build, load_blueprint
from worlds.toolscale.domain import Domain
from worlds.toolscale.planner import Planner
from worlds.toolscale.program import ToolError, calculate, rules, run
from worlds.toolscale.wishes import Wish


def library():
    return {
        "shelves": {"S1": {"shelf": "S1", "room": "hall"}},
        "books": {
            f"B{n}": {"book": f"B{n}", "shelf": "S1", "pages": 100 * n, "price": 2.5 * n}
            for n in (1, 2, 3)
        },
    }


def tool(*program):
    return {"kind": "write", "function": {"name": "t"}, "program": list(program)}


def test_reads_select_project_and_aggregate():
    rows = "rows = select(books, pages > least, shelf == 'S1', fields=[book])"
    every = "every = select(books, pages > least, shelf == 'S1')"
    for aggregate, value in (("sum(every, price)", 12.5), ("count(every)", 2)):
        program = tool(rows, every, f"return {{'rows': rows, 'total': {aggregate}}}")
        wanted = {"rows": [{"book": "B2"}, {"book": "B3"}], "total": value}
        assert run(program, {"least": 100}, library()) == wanted
    assert (
        run(
            tool(every, "return round(sum(every, price) / count(every), 2)"),
            {"least": 100},
            library(),
        )
        == 6.25
    )
    program = tool("b = find(books, pages in [200, 999], 'no')", "return b.book")
    assert run(program, {}, library()) == "B2"
    for step, says in (
        ("c = find(books, 'not {n}')", "^not 7$"),  # find wants exactly one
        ("require(b.price == n, '{b.book} costs {b.price}, not {n}.')", "^B2 costs 5.0, not 7"),
        ("c = get(books, n)", "^books has no 7.$"),
    ):
        with pytest.raises(ToolError, match=says):
            run(tool("b = get(books, 'B2')", step), {"n": 7}, library())


def test_writes_insert_update_delete_and_compute():
    tables = library()
    before, books = tables["books"]["B1"], tables["books"]
    insert = "insert(books, id, book=id, shelf='S1', pages=4 + 5 - 1, price=round(10 / 3, 2))"
    assert run(tool("id = next_id('books', 'B')", insert, "return id"), {}, tables) == "B4"
    assert tables["books"]["B4"] == {"book": "B4", "shelf": "S1", "pages": 8, "price": 3.33}
    update = "update(books, 'B1', pages=2 * lookup(size, {'big': 50, 'small': 1}))"
    run(tool(update), {"size": "big"}, tables)
    run(tool("delete(books, 'B2')"), {}, tables)
    assert tables["books"]["B1"]["pages"] == 100 and list(tables["books"]) == ["B1", "B3", "B4"]
    # Records and tables are never changed in place.
    assert before["pages"] == 100 and before is not tables["books"]["B1"] and len(books) == 3


def test_a_program_works_on_lists_within_records():
    orders = {"O1": {"order": "O1", "lines": [{"id": n, "cost": n * 1.5} for n in (1, 2, 3)]}}
    lines = [
        "found = get(orders, order)",
        "line = find(found.lines, id == id, 'no {id}')",
        "require(line.cost > 2, 'only {line.cost}', 'Cheap ones stay.')",
        "rest = change(found.lines, id == id, cost=round(line.cost / 2, 2))",
        "more = rest + [{'id': 9, 'cost': lookup(id, {'2': 7})}]",
        "update(orders, order, lines=more, total=sum(more, cost))",
        "dear = select(more, cost > 4)",
        "return {'left': count(dear)}",
    ]
    book = tool(*lines)
    tables = {"orders": orders}
    assert run(book, {"order": "O1", "id": 2}, tables) == {"left": 2}
    assert [line["cost"] for line in tables["orders"]["O1"]["lines"]] == [1.5, 1.5, 4.5, 7]
    assert tables["orders"]["O1"]["total"] == 14.5 and orders["O1"]["lines"][1]["cost"] == 3.0
    for given, says in ((1, "^only 1.5$"), (8, "^no 8$")):
        with pytest.raises(ToolError, match=says):
            run(book, {"order": "O1", "id": given}, {"orders": orders})


def test_a_call_that_fails_changes_nothing():
    failing = [
        "require(1 == 2, 'a rule')",
        "delete(books, 'B9')",
        "update(books, 'B9')",
        "insert(books, 'B1')",
        "x = 1 / 0",
        "x = lookup('a', {})",
        "x = get('books')",
        "return books.x",
        "return 1 < 2 < 1",
    ]
    writes = "delete(books, 'B2')", "update(books, 'B1', pages=1)", "insert(books, 'B7')"
    for last in failing:
        tables = library()
        with pytest.raises(ToolError):
            run(tool(*writes, last), {}, tables)
        assert json.dumps(tables) == json.dumps(library())


def test_the_calculator_agrees_with_python_and_refuses_the_rest():
    rng = random.Random(5)
    for _ in range(300):
        a, b, c, d = (
            rng.choice((str(rng.randint(1, 99)), f"{rng.uniform(0.1, 9):.2f}")) for _ in range(4)
        )
        text = f"{a} {rng.choice('+-*/')} ({b} {rng.choice('+*/')} {c}) {rng.choice('+-*')} {d}"
        assert calculate(text) == round(eval(text), 2)
    assert calculate("1,000 * 3") == 3000 and calculate("-2 + +3") == 1
    bad = ("2 ** 9", "7 // 2", "__import__('os')", "1 +", "", "(" * 150, "1 / 0", "1" * 201)
    for text in (*bad, "(1, 2)", "9e9", "...", "(1)(2)"):
        with pytest.raises(ToolError):
            calculate(text)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_domain_is_as_large_as_promised_and_sound(name):
    for seed in range(3):
        domain, w = build(name, seed)
        kinds = [t["kind"] for t in domain.tools]
        assert len(domain.tables) >= 3 and sum(map(len, domain.tables.values())) >= 200
        assert len(domain.by_name) == len(domain.tools) >= 12
        assert kinds.count("calculate") == kinds.count("handover") == 1
        assert kinds.count("read") >= 3 and kinds.count("write") >= 3
        for t in domain.tools:
            assert t["function"]["name"] in domain.policy
            for rule in rules(t):  # the policy says what the preconditions enforce
                assert rule in domain.policy
        for table, rows in domain.tables.items():
            drawn = w.data["tables"][table]
            for key, row in rows.items():
                assert row[drawn["key"]] == key
                for field, how in drawn["fields"].items():
                    if isinstance(how, list) and how[0] in ("link", "owner"):
                        assert row[field] in domain.tables[how[1]]


def test_every_wish_of_a_domain_can_be_had_plainly():
    for name in BUILT_IN:
        domain, w = build(name, 1)
        people = [*next(iter(domain.tables.values()))]
        rng = random.Random(0)
        for kind in w.data["wishes"]:
            for _ in range(300):
                act = Act(domain, w, rng.choice(people), rng, named=True)
                try:
                    Planner(domain, w, rng)._plain(act, Wish(act, kind), True)
                    break
                except (UnfitError, ToolError):
                    pass
            else:
                raise AssertionError(f"{name}: {kind}")


def test_a_new_domain_is_one_file_and_a_bad_one_is_named(tmp_path):
    railway = json.loads((HOME / "railway.json").read_text())
    blueprint = railway | {"domain": "ferries", "business": "a ferry line"}
    path = tmp_path / "ferries.json"
    path.write_text(json.dumps(blueprint))
    domain, _ = build(str(path), 3)
    assert domain.name == "ferries" and len(domain.tools) >= 12

    changes = (
        (lambda b: b["wishes"]["refund"].update(do=["refund(it.id)"]), "no domain can be made"),
        (lambda b: b.pop("tools"), "ferries.json: tools is missing"),
        (lambda b: b["tables"]["trains"]["fields"].update(kind=["colour"]), "not a kind of draw"),
        (lambda b: b["tools"]["show_train"].update(program=["import os"]), "is not a step"),
        (lambda b: b["tools"]["show_train"].update(program=["x = open(name)"]), "no meaning here"),
    )
    for seed, (change, says) in enumerate(changes):
        bad = copy.deepcopy(blueprint)
        change(bad)
        path.write_text(json.dumps(bad))
        with pytest.raises(UserError, match=says):
            build(str(path), 100 + seed)
    with pytest.raises(UserError, match="there are bank"):
        load_blueprint("ferry")


def test_a_world_is_written_and_read_back(tmp_path):
    domain, _ = build("bank", 0)
    domain.save(tmp_path / "bank")
    assert Domain.load(tmp_path / "bank") == domain
