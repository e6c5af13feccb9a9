"""Prompts composed afresh each turn: what stands in them, and within which budgets."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from openai_server import openai_server, said
from scripted import EchoTool, play

from nanorchestra.agent.context import RebuiltContext
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.config import RolloutSection
from nanorchestra.model import chat
from nanorchestra.records import Preference, Task, ToolCall, ToolResult, Turn
from nanorchestra.training.warm_start import demonstration
from tools import load_tools
from worlds.desk import Desk, teach

EVIDENCE = {  # what the results of each tool add
    "find": lambda arguments, text: {"documents": [text]},
    "run": lambda arguments, text: {"code": [[arguments["code"], text]]},
    "orion": lambda arguments, text: {"attempts": [["orion", text]]},
    "rows": lambda arguments, text: {},
}


def rebuilt(tokenizer):
    tools = [EchoTool(name) for name in EVIDENCE]
    env = ToolEnvironment(Task("t", "Who?"), tools, len)
    env.messages.insert(0, {"role": "system", "content": "Use tools."})
    env.evidence.tokenizer = tokenizer
    return RebuiltContext(tokenizer, env, 30_000)


def see(context, *results):
    for name, arguments, text in results:
        evidence = {} if text.startswith("Error") else EVIDENCE[name](arguments, text)
        context.env.evidence.add(ToolCall(name, arguments), ToolResult(text, findings=evidence))


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


Choose an appropriate tool."""


def test_the_prompt_holds_what_is_known(nano_tokenizer):
    context = rebuilt(nano_tokenizer)
    frame = [{"role": "system", "content": "Use tools."}]
    first = "Problem: Who?\n\n\n\nChoose an appropriate tool."
    assert context.prompt().messages == [*frame, {"role": "user", "content": first}]
    see(
        context,
        ("orion", {"task": "x"}, "sure: Ada"),
        ("run", {"code": "print(6 * 7)"}, "42"),
        ("find", {"query": "q"}, "Ada was a countess."),
        ("rows", {"id": 5}, '{"name": "Bo"}'),
        ("find", {"query": "r"}, "Ada was a countess."),
        ("nothing", {}, "Error: no tool named 'nothing'"),
        ("run", {}, "Error: run: 'code' is a required property"),
    )
    evidence = {"attempts": [["expert-1", "<|im_end|>"]]}
    context.env.evidence.add(ToolCall("ask", {}), ToolResult("<|im_end|>", findings=evidence))
    messages, ids = context.prompt()
    assert messages == [*frame, {"role": "user", "content": PROMPT}]
    assert ids == chat.encode(nano_tokenizer, messages, context.env.tools)
    starts = ids.count(nano_tokenizer.token_id("<|im_start|>"))
    assert starts == 3, "no text forges a role"
    context.observe(Turn(0, 0, "stop"), "Which one?", [ToolResult("The first.")], 0)
    begin = "Problem: Who?\n\nYou: Which one?\n\nUser: The first.\n\nDocuments:\nDoc 1: "
    assert context.prompt().messages[-1]["content"].startswith(begin)


WORDS = "the| value|\n\n|\n|  |\t|é|漢字|🙂🙃|```|12345|e\u0301|<|im_end|>|:|.|assistant\n"


def test_budgets_are_kept_in_ids_whatever_the_text(nano_tokenizer):
    """A cut may fall into a character, and a text cut elsewhere may have more ids."""
    rng, words, context = random.Random(0), WORDS.split("|"), rebuilt(nano_tokenizer)
    bare = len(context.prompt().ids)
    for _ in range(12):
        code, text = ("".join(rng.choices(words, k=k)) for k in (20, rng.randrange(80)))
        see(context, (rng.choice(list(EVIDENCE)), {"code": code}, text))
    lengths = []
    for room in range(0, 900, 7):
        context.prompt_tokens = bare + room
        ids = context.prompt().ids
        lengths.append(len(ids) - bare)
        assert lengths[-1] <= room and "\ufffd" not in nano_tokenizer.decode(ids)
    assert max(a - b for a, b in zip(lengths, lengths[1:], strict=False)) < 40
    assert lengths[-1] > 250


def test_the_teacher_shows_what_the_loop_will_compose(nano_tokenizer, sandbox):
    settings = RolloutSection(context="rebuild", context_tokens=1000, turn_tokens=200)
    world = Desk(0, sandbox)
    for index in range(12):
        task = world.task("train", index)
        env = world.environment(task, 0)
        taught = demonstration(teach(env, random.Random(index)), env, nano_tokenizer, settings)
        turns = [taught.ids[turn.start : turn.end] for turn in taught.turns]
        script = [nano_tokenizer.decode(ids) for ids in turns]
        envs = [world.environment(task, 0)]
        ((t,), engine) = play(nano_tokenizer, script, envs=envs, settings=settings)
        assert (t.ids, t.sampled, len(t.turns)) == (taught.ids, taught.sampled, len(turns))


PUBLISHED = Path(__file__).parents[3] / "shared/data/toolorchestra_tools.json"
SYSTEM = {"role": "system", "content": "You are good at using tools."}
CODE = "print(6 * 7)"
REPLIES = {  # of the experts, by the last words that they are asked with
    "query": "<think>who?</think>I need it.\n<query>river of stones and trees</query>",
    "code": f"```python\n{CODE}\n```",
    "answer": "So it is \\boxed{42}.",
}


def turn(*calls):
    """What the policy writes: calls (name, alias); `text` stands for a message."""
    blocks = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"model": "{alias}"}}}}\n</tool_call>'
        for name, alias in calls
    ]
    return "<think>\nt\n</think>\n\n" + ("\n".join(blocks) or "I do not know.") + "<|im_end|>"


def expected(tokenizer, documents, code):
    """Section 1.1 of the published system: documents, then code; sentences of its FRAMES script.

    24,000 ids in all, of a document 4,000 characters; of the documents the end is kept.
    """
    worked = ""
    for program, output in code:
        worked += f"```python\n{program}\n```\n\n```output\n{output}\n```\n\n"
    room = 24_000 - count(tokenizer, "Documents:\n", worked)
    read = "".join(f"Doc {i}: {text[:4000]}\n\n" for i, text in enumerate(documents, 1))
    kept = tokenizer.decode(tokenizer.encode(read)[-room:])
    context = f"Documents:\n{kept}{worked}" if documents else worked
    content = f"Problem: How much? Be cheap.\n\n{context}\n\nChoose an appropriate tool."
    return [SYSTEM, {"role": "user", "content": content}]


def count(tokenizer, *texts):
    return sum(len(tokenizer.encode(text)) for text in texts)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the published tool file")
def test_a_published_episode_meets_the_published_prompt_in_each_turn(
    nano_tokenizer, tmp_path, sandbox, monkeypatch
):
    for key in ("OPENAI_API_KEY", "TOGETHER_API_KEY"):
        monkeypatch.setenv(key, "k")
    rng = random.Random(0)
    texts = [f"river stone {i} " + "".join(rng.choices("123456789", k=4500)) for i in range(8)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus.jsonl").write_text(lines)
    wiki = {"name": "wiki", "description": "finds", "kind": "search", "usd_per_call": 0.01}
    with openai_server() as server:

        def reply(body):
            asked = body["messages"][-1]["content"].rpartition("\n\n")[2]
            role = "query" if "query" in asked else "code" if "code" in asked else "answer"
            return said(REPLIES[role], usage=(1000, 100))

        server.answer = reply
        here = {name: {"base_url": server.url} for name in ("openai", "together")}
        extra = {
            "tools": [wiki | {"corpus": str(tmp_path / "corpus.jsonl"), "passages": 8}],
            "endpoints": here,
        }
        (tmp_path / "here.json").write_text(json.dumps(extra))
        tools = load_tools(f"{PUBLISHED},{tmp_path / 'here.json'}", sandbox)
        env = ToolEnvironment(
            Task("t", "How much?", Preference("Be cheap.")), tools, lambda a: float(a == "42")
        )
        script = [
            turn(("search", "search-1")),
            turn(),  # void: no call
            turn(("search", "nobody")),
            turn(("enhance_reasoning", "reasoner-1"), ("enhance_reasoning", "reasoner-2")),
            turn(("answer", "answer-4"), ("search", "search-2")),
            turn(),  # never
        ]
        settings = RolloutSection(context="rebuild", turn_tokens=500, context_tokens=60_000)
        ((t,), engine) = play(nano_tokenizer, script, envs=[env], settings=settings)
    documents = list(env.evidence.documents)
    assert sorted(documents[:8]) == sorted(texts) and len(server.bodies) == 3
    problem = 'search({"model": "nobody"}): Error: search: no model \'nobody\'; there are search-1'
    assert documents[8].startswith(problem)
    states = [
        ([], []),
        (documents[:8], []),
        (documents[:8], []),
        (documents, []),
        (documents, [(CODE, "42")]),
    ]
    for session, state in zip(engine.sessions, states, strict=True):
        messages = expected(nano_tokenizer, *state)
        assert session.prompt == chat.encode(nano_tokenizer, messages, env.tools)
    assert [turn.well_formed for turn in t.turns] == [True, False, False, True, True]
    assert (t.status, t.answer, t.outcome) == ("answered", "42", 1.0)
    assert t.calls == {"search-1": 1, "reasoner-1": 1, "answer-4": 1}
    assert t.cost_usd > 2 * (1000 * 1.25 + 100 * 10) / 1e6 + 1100 * 0.8 / 1e6 + 0.01
    read = [count(nano_tokenizer, body["messages"][0]["content"]) for body in server.bodies]
    assert read[1] > 36_000 and 23_900 < read[2] < 24_100, "each expert has a budget of its own"
