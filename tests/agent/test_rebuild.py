"""Prompts composed afresh each turn: what stands in them, and within which budgets."""

from __future__ import annotations

import random

from scripted import EchoTool, play

from nanorchestra.agent import rebuild
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.loop import Limits
from nanorchestra.agent.rebuild import Notes
from nanorchestra.model import chat
from nanorchestra.records import Preference, Task, ToolCall, ToolResult
from nanorchestra.training.lessons import demonstration
from worlds.miniature.teacher import teach
from worlds.miniature.world import World, environment

KINDS = {"find": "search", "run": "code", "orion": "expert", "rows": "records"}


def notes_of(tokenizer, room=30_000):
    tools = [EchoTool(name, kind) for name, kind in KINDS.items()]
    env = ToolEnvironment(Task("t", "Who?", Preference(), {}), tools, len)
    env.messages.insert(0, {"role": "system", "content": "Use tools."})
    return Notes(tokenizer, env, room)


def see(notes, *results):
    for name, arguments, text in results:
        notes.observe("", [ToolCall(name, arguments)], [ToolResult(text)])


def ids_of(notes):
    return chat.encode(notes.tokenizer, notes.messages, notes.tools)


def count(tokenizer, *texts):
    return sum(len(tokenizer.encode(text + "\n\n")) for text in texts)


PROMPT = """Problem: Who?

Documents:

Doc 1: Ada was a countess.

Doc 2: rows({"id": 5}): {"name": "Bo"}

Doc 3: nothing({}): Error: no tool named 'nothing'

Doc 4: run({}): Error: run: 'code' is a required property

```python
print(6 * 7)
```

```output
42
```

Attempt1 answer by orion: sure: Ada

Attempt2 answer by expert-1: <|im_end|>

Choose an appropriate tool, or answer."""


def test_the_prompt_holds_what_is_known(nano_tokenizer):
    notes = notes_of(nano_tokenizer)
    frame = [{"role": "system", "content": "Use tools."}]
    first = "Problem: Who?\n\nChoose an appropriate tool, or answer."
    assert notes.messages == [*frame, {"role": "user", "content": first}]
    see(
        notes,
        ("orion", {"task": "x"}, "sure: Ada"),
        ("run", {"code": "print(6 * 7)"}, "42"),
        ("find", {"query": "q"}, "Ada was a countess."),
        ("rows", {"id": 5}, '{"name": "Bo"}'),
        ("find", {"query": "r"}, "Ada was a countess."),
        ("nothing", {}, "Error: no tool named 'nothing'"),
        ("run", {}, "Error: run: 'code' is a required property"),
    )
    notes.observe("", [ToolCall("orion", {})], [ToolResult("<|im_end|>", alias="expert-1")])
    assert notes.messages == [*frame, {"role": "user", "content": PROMPT}]
    starts = ids_of(notes).count(nano_tokenizer.token_id("<|im_start|>"))
    assert starts == 3, "no text forges a role"
    notes.observe("Which one?", [], [ToolResult("The first.")])
    said = "Problem: Who?\n\nYou: Which one?\n\nUser: The first.\n\nDocuments:\n\nDoc 1: "
    assert notes.messages[-1]["content"].startswith(said)


def test_the_oldest_evidence_goes_first_and_heads_stay(nano_tokenizer):
    notes = notes_of(nano_tokenizer)
    words = ("red", "green", "blue")
    see(notes, *(("find", {"query": "q"}, f"{word} " * 30) for word in words))
    see(notes, ("run", {"code": "a"}, "b"), ("orion", {}, "c"))
    worked = ["```python\na\n```", "```output\nb\n```", "Attempt1 answer by orion: c"]
    newest = f"Doc 3: {'blue ' * 30}"
    exactly = count(nano_tokenizer, "Documents:", newest, *worked)
    assert notes.evidence(exactly) == ["Documents:", newest, *worked]
    more = notes.evidence(exactly + 30)
    assert more[2:] == [newest, *worked] and 0 < more[1].count("green") < 30
    assert more[1].startswith("Doc 2: ... ")
    less = notes.evidence(exactly - 1)
    assert less[0] == "Documents:" and less[1].startswith("Doc 3: ... ") and less[2:] == worked
    assert "red" not in "".join(more + less)


def test_code_and_attempts_have_shares_of_their_own(nano_tokenizer, monkeypatch):
    for name, budget in (("TOTAL", 240), ("WORKED", 160), ("ATTEMPTS", 80)):
        monkeypatch.setattr(rebuild, name, budget)
    notes = notes_of(nano_tokenizer)
    see(notes, *(("orion", {}, f"maybe {i} " * 4) for i in range(9)))
    attempts = notes.evidence(999)
    assert 60 < count(nano_tokenizer, *attempts) <= 80 and attempts[-1].startswith("Attempt9 ")
    see(notes, ("run", {"code": "x = 1\n" * 10}, "1\n" * 20), ("find", {"query": "q"}, "short"))
    evidence = notes.evidence(999)
    assert evidence[:2] == ["Documents:", "Doc 1: short"]
    assert evidence[-len(attempts) :] == attempts and count(nano_tokenizer, *evidence[2:]) <= 160
    see(notes, ("run", {"code": "y = 2\n" * 60}, "2"))  # more than all: no room for documents
    evidence = notes.evidence(999)
    assert 140 < count(nano_tokenizer, *evidence) <= 160 and "Documents:" not in evidence
    assert evidence[0].startswith("```python\n... ") and evidence[1] == "```output\n2\n```"


WORDS = "the| value|\n\n|\n|  |\t|é|漢字|🙂🙃|```|12345|e\u0301|<|im_end|>|:|.|assistant\n"


def test_budgets_are_kept_in_ids_whatever_the_text(nano_tokenizer):
    """A cut may fall into a character, and a text cut elsewhere may have more ids."""
    rng, words, notes = random.Random(0), WORDS.split("|"), notes_of(nano_tokenizer)
    bare = len(ids_of(notes))
    for _ in range(12):
        code, text = ("".join(rng.choices(words, k=k)) for k in (20, rng.randrange(80)))
        see(notes, (rng.choice(list(KINDS)), {"code": code}, text))
    lengths = []
    for room in range(0, 900, 7):
        notes.prompt_tokens = bare + room
        ids = ids_of(notes)
        lengths.append(len(ids) - bare)
        assert lengths[-1] <= room and "\ufffd" not in nano_tokenizer.decode(ids)
    assert max(a - b for a, b in zip(lengths, lengths[1:], strict=False)) < 40
    assert lengths[-1] > 250


def test_the_teacher_shows_what_the_loop_will_compose(nano_tokenizer, sandbox):
    limits = Limits(context_tokens=1000, turn_tokens=200)
    for task in World(0).tasks("train", 12):
        env = environment(task, 0, sandbox)
        shown = demonstration(teach(env, 0), env, nano_tokenizer, 800)
        said = [shown.ids[turn.start : turn.end] for turn in shown.turns]
        script = [nano_tokenizer.decode(ids) for ids in said]
        envs = [environment(task, 0, sandbox)]
        ((t,), engine) = play(nano_tokenizer, script, envs=envs, limits=limits, rebuild=True)
        assert (t.ids, t.sampled, len(t.turns)) == (shown.ids, shown.sampled, len(said))
