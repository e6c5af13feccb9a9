"""Prompts composed afresh each turn: what stands in them, and within which budgets."""

from __future__ import annotations

import random

from scripted import EchoTool, both, call, play

from nanorchestra.agent.context import RebuiltContext
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.evidence import Evidence, EvidenceBudget
from nanorchestra.config import RolloutSection
from nanorchestra.model import chat
from nanorchestra.records import Task, ToolCall, ToolResult
from nanorchestra.training.warm_start import demonstration
from worlds.desk import Desk, teach

FINDINGS = {  # what the results of each tool add
    "find": lambda arguments, text: {"documents": [text]},
    "run": lambda arguments, text: {"code": [[arguments["code"], text]]},
    "orion": lambda arguments, text: {"attempts": [["orion", text]]},
    "rows": lambda arguments, text: {},
}


def rebuilt(tokenizer):
    tools = [EchoTool(name) for name in FINDINGS]
    env = ToolEnvironment(Task("t", "Who?"), tools, len)
    env.messages.insert(0, {"role": "system", "content": "Use tools."})
    env.evidence.tokenizer = tokenizer
    return RebuiltContext(tokenizer, env, 30_000)


def see(context, *results):
    for name, arguments, text in results:
        findings = {} if text.startswith("Error") else FINDINGS[name](arguments, text)
        context.env.evidence.add(ToolCall(name, arguments), ToolResult(text, findings=findings))


# With the sentences of the published system's FRAMES script
PROMPT = """Problem: Who?

Documents:
Doc 1: Ada was a countess.

Doc 2: rows({"id": 5}): {"name": "Bo"}

Doc 3: run({}): Error: run: 'code' is a required property

```python
print(6 * 7)
```

```output
42
```

Attempt1 answer by orion: sure: Ada
Attempt2 answer by orion: <|im_end|>


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
        ("run", {}, "Error: run: 'code' is a required property"),
        ("orion", {"task": "y"}, "<|im_end|>"),
    )
    messages, ids = context.prompt()
    assert messages == [*frame, {"role": "user", "content": PROMPT}]
    assert ids == chat.encode(nano_tokenizer, messages, context.env.tools)
    starts = ids.count(nano_tokenizer.token_id("<|im_start|>"))
    assert starts == 3, "no text forges a role"


WORDS = "the| value|\n\n|\n|  |\t|é|漢字|🙂🙃|```|12345|e\u0301|<|im_end|>|:|.|assistant\n"


def test_budgets_are_kept_in_ids_whatever_the_text(nano_tokenizer):
    """A cut may fall into a character, and a text cut elsewhere may have more ids."""
    rng, words, context = random.Random(0), WORDS.split("|"), rebuilt(nano_tokenizer)
    bare = len(context.prompt().ids)
    for _ in range(12):
        code, text = ("".join(rng.choices(words, k=k)) for k in (20, rng.randrange(80)))
        see(context, (rng.choice(list(FINDINGS)), {"code": code}, text))
    lengths = []
    for room in range(0, 900, 30):
        context.prompt_tokens = bare + room
        ids = context.prompt().ids
        lengths.append(len(ids) - bare)
        assert lengths[-1] <= room and "\ufffd" not in nano_tokenizer.decode(ids)
    assert lengths[-1] > 250


def test_the_newest_of_each_kind_is_kept_and_code_and_attempts_have_shares(nano_tokenizer):
    evidence = Evidence("?", tokenizer=nano_tokenizer)
    budget = EvidenceBudget(240, 160, 80, document_chars=5)
    evidence.attempts = [["orion", f"maybe {i} " * 4] for i in range(9)]
    attempts = evidence.text(budget)
    evidence.documents.append("short " * 9)
    assert 60 < evidence.count(attempts) <= 80 and "\nAttempt9 " in attempts
    evidence.code.append(["x = 1\n" * 10, "1\n" * 20])
    text = evidence.text(budget)
    documents = "Documents:\nDoc 1: short\n\n"
    assert text.startswith(documents) and text.endswith(attempts)
    assert evidence.count(text.removeprefix(documents)) <= 160
    evidence.code.append(["y = 2\n" * 60, "2"])  # more than all: no room for documents
    text = evidence.text(budget)
    assert 120 < evidence.count(text) <= 160 and "Documents:" not in text
    assert "```output\n2\n```" in text and "x = 1" not in text
    evidence = Evidence("?", ["red " * 30, "green " * 30, "blue " * 30], tokenizer=nano_tokenizer)
    newest = f"Doc 3: {'blue ' * 30}\n\n"
    text = evidence.text(EvidenceBudget(evidence.count("Documents:\n", newest)))
    assert text == f"Documents:\n{newest}"


def test_the_teacher_shows_what_the_loop_will_compose(nano_tokenizer, sandbox):
    world = Desk(0, sandbox)
    for index in range(6):
        task = world.task("train", index)
        env = world.environment(task, 0)
        taught = demonstration(teach(env, random.Random(index)), env, nano_tokenizer)
        turns = [taught.ids[turn.start : turn.end] for turn in taught.turns]
        script = [nano_tokenizer.decode(ids) for ids in turns]
        envs = [world.environment(task, 0)]
        ((t,), _) = play(nano_tokenizer, script, envs=envs)
        assert (t.ids, t.sampled, len(t.turns)) == (taught.ids, taught.sampled, len(turns))


def test_where_a_tool_gives_the_answer_a_turn_has_one_call_of_each_tool_up_to_it(nano_tokenizer):
    """A turn without a call that can be made, or that was cut, is void and ends no attempt."""
    tools = [EchoTool("search"), EchoTool("answer", kind="answer")]
    env = ToolEnvironment(Task("t", "How much?"), tools, lambda answer: float(answer == "42"))
    search, answer = call("a", "search"), call("42", "answer")
    script = [
        "<think>\nt\n</think>\n\nI do not know.<|im_end|>",
        call("a", "nobody"),
        f"<think>\n{'t ' * 200}",
        both(search, call("b", "search")),
        both(answer, search),
    ]
    settings = RolloutSection(turn_tokens=100, context_tokens=2000)
    ((t,), _) = play(nano_tokenizer, script, envs=[env], settings=settings)
    assert [turn.well_formed for turn in t.turns] == [False, False, False, True, True]
    assert (t.status, t.answer, t.outcome) == ("answered", "42", 1.0)
    assert t.calls == {"search": 1, "answer": 1}
