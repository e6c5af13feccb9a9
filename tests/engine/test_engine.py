"""The engine against a naive full forward, whatever it batches, shares, chunks or preempts."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from invariants import check_scheduler

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.guide import Form, Guide
from nanorchestra.engine.sampler import draw_tokens
from nanorchestra.errors import NotFiniteError, UserError
from nanorchestra.model import chat
from nanorchestra.model.attention import PackedAttention, Segment
from nanorchestra.model.checkpoint import named_hf_tensors
from nanorchestra.model.native import PackedLinear, library, pack
from nanorchestra.model.quantise import linears
from nanorchestra.model.qwen3 import ModelConfig, Qwen3

VOCAB = 97
CONFIG = ModelConfig(VOCAB, 32, 64, 2, 4, 2, head_dim=16, max_position_embeddings=512)
GREEDY = SamplingParams(max_tokens=20, temperature=0)


def make_model(seed: int = 0) -> Qwen3:
    model = Qwen3(CONFIG)
    model.init_weights(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)  # far from uniform, so that a wrong key changes the text
    return model


@pytest.fixture(scope="module")
def model() -> Qwen3:
    return make_model()


def naive_logits(model: Qwen3, ids: list[int]) -> torch.Tensor:
    attention = PackedAttention([Segment(0, len(ids))])
    with torch.inference_mode():
        return model.logits(model(torch.tensor(ids), torch.arange(len(ids)), attention))


def naive_sample(model: Qwen3, prompt: list[int], params: SamplingParams) -> list[int]:
    """Token by token with a full forward each time; the noise is the sampler's."""
    ids = list(prompt)
    for _ in range(params.max_tokens):
        logits = naive_logits(model, ids)[-1:]
        (draw,) = draw_tokens(logits, VOCAB, [params], [len(ids)], [None]).listed([params])
        ids.append(draw.token)
    return ids[len(prompt) :]


def assert_logprobs(model: Qwen3, prompt: list[int], completion, temperature=1.0):
    """Both are fp32 sums in different orders, and the attention here is sharp."""
    sampled = completion.token_ids
    logits = naive_logits(model, prompt + sampled)[len(prompt) - 1 : -1].double()
    expected = (logits / temperature).log_softmax(1).gather(1, torch.tensor(sampled)[:, None])
    reported = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (reported - expected[:, 0]).abs().max() < 1e-4


def assert_no_leak(engine: Engine) -> None:
    check_scheduler(engine.scheduler)
    assert not engine.has_work and engine.blocks.available == engine.blocks.num_pages


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        check_scheduler(engine.scheduler)


def ragged_prompts() -> list[list[int]]:
    """A group, prompts with a common beginning, short ones, and one of several tiles of queries."""
    rng = random.Random(0)

    def word(count: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(count)]

    common = word(45)
    prompts = [common + word(3)] * 3 + [common + word(n) for n in (1, 20)]
    return prompts + [word(n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 200)] + [common]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 24},
        {"page_size": 1},
        {"page_size": 4, "num_pages": 58, "max_batch_tokens": 64},
        {"packed": True, "page_size": 32, "max_running": 3, "num_pages": 16},
    ],
    ids=lambda settings: ", ".join(f"{k} {v}" for k, v in settings.items()) or "usual",
)
def test_a_request_gets_the_text_and_logprobs_it_has_alone(model, settings):
    """Seeds and temperatures differ from row to row; some rows are greedy, some end early.

    A packed model gives it the same bits too.
    """
    settings, served = {"num_pages": 1500} | settings, model
    if packed := settings.pop("packed", False) and library(torch.float32):
        pack(served := copy.deepcopy(model))
        assert linears(served, PackedLinear)
    engine, prompts = Engine(served, **settings), ragged_prompts()
    params = [
        SamplingParams(max_tokens=3 + 4 * (i % 5), seed=i, temperature=(0.0, 0.7, 1.4)[i % 3])
        for i in range(len(prompts))
    ]
    completions = engine.generate(prompts, params)
    for prompt, p, completion in zip(prompts, params, completions, strict=True):
        assert completion.token_ids == naive_sample(model, prompt, p)
        assert (completion.prompt_tokens, completion.finish_reason) == (len(prompt), "length")
        assert_logprobs(model, prompt, completion, p.temperature or 1.0)
        if packed:
            alone = Engine(served, num_pages=20).generate([prompt], p)[0]
            assert alone.logprobs == completion.logprobs
    assert_no_leak(engine)


def test_sessions_prefill_only_what_is_new(model):
    engine, rng = Engine(model, num_pages=300), random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(70)]
    sessions = [engine.session(prompt) for _ in range(4)]
    for turn in range(3):
        before, given, cases = engine.stats["prefill_tokens"], 0, []
        for i, session in enumerate(sessions):
            if turn:
                more = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
                session.append(more)
                given += len(more) + 1  # and the last sampled token of the turn before
            params = SamplingParams(max_tokens=6 + i, seed=10 * turn + i)
            cases.append((list(session.ids), params, session.submit(params)))
        finish(engine)
        for session, (history, params, request) in zip(sessions, cases, strict=True):
            assert request.completion.token_ids == naive_sample(model, history, params)
            assert_logprobs(model, history, request.completion)
            assert session.ids == history + request.completion.token_ids
        assert not turn or engine.stats["prefill_tokens"] - before == given
    for session in sessions:
        session.close()
        session.close()
    assert_no_leak(engine)


def test_a_session_is_used_one_turn_at_a_time(model):
    engine = Engine(model, num_pages=30)
    session = engine.session([1, 2, 3])
    request = session.submit(GREEDY)
    for misuse in (lambda: session.append([1]), lambda: session.submit(GREEDY)):
        with pytest.raises(UserError, match="a turn is being sampled"):
            misuse()
    engine.step()
    engine.abort(request)
    assert session.ids == [1, 2, 3] + request.completion.token_ids and len(session.ids) == 4
    session.append([7])
    assert session.sample(GREEDY).token_ids == naive_sample(model, session.ids[:5], GREEDY)
    session.submit(GREEDY)
    session.close()
    with pytest.raises(UserError, match="closed"):
        session.append([1])
    assert_no_leak(engine)


class Letters:
    """Ids are letters; those from 60 on do not exist, 59 is a special token that ends the text."""

    vocab_size, eos_ids = 60, (59,)

    def bytes_of(self, token: int) -> bytes:
        return bytes([97 + token % 26]) if token < 59 else b"<end>"

    def decode(self, ids, skip_special=False):
        return b"".join(self.bytes_of(i) for i in ids if not (skip_special and i == 59)).decode()


def test_score_gives_the_log_probabilities_of_given_ids(model):
    engine, prompts = Engine(model, Letters(), num_pages=10), ragged_prompts()
    for ids, scores in zip(prompts, engine.score(prompts), strict=True):
        logprobs = naive_logits(model, ids)[:-1, :60].double().log_softmax(1)
        for value, row, token in zip(scores, logprobs, ids[1:], strict=True):
            expected = row[token].item() if token < 60 else -float("inf")
            assert value == pytest.approx(expected, abs=2e-5)
    assert engine.score([]) == [] and engine.score([[5]]) == [[]]
    with pytest.raises(UserError, match="513 tokens"):
        engine.score([[1] * 513])


def test_a_tokenizer_that_names_no_end_of_a_turn_leaves_that_of_the_model():
    class Endless(Letters):
        eos_ids = ()

    model = Qwen3(replace(CONFIG, eos_token_ids=(3, 4)))
    assert Engine(model, Endless(), num_pages=9).eos_ids == {3, 4}
    assert Engine(model, Letters(), num_pages=9).eos_ids == {59}


def test_requests_in_flight_go_on_with_new_weights():
    """A running group, a request that waits, a session: tokens are those of their versions."""
    old, new, prompt = make_model(0), make_model(1), list(range(40))
    engine = Engine(make_model(0), num_pages=60, max_running=4)
    session = engine.session(prompt)
    session.sample(GREEDY)
    history = list(session.ids)
    requests = [engine.submit(prompt, SamplingParams(max_tokens=12, seed=i)) for i in range(5)]
    for _ in range(4):
        engine.step()
    assert engine.update_weights(named_hf_tensors(new)) == engine.weight_version == 1
    finish(engine)
    expected = [[0] * 4 + [1] * 8] * 4 + [[1] * 12]
    assert [r.completion.weight_versions for r in requests] == expected
    for request in requests:
        ids = request.completion.token_ids
        before = request.weight_versions.count(0)
        assert ids[:before] == naive_sample(old, prompt, request.params)[:before]
        rest = SamplingParams(max_tokens=12 - before, seed=request.params.seed)
        assert ids[before:] == naive_sample(new, prompt + ids[:before], rest)
    assert session.sample(GREEDY).token_ids == naive_sample(new, history, GREEDY)
    session.close()
    assert engine.update_weights() == 2
    assert engine.generate([prompt], GREEDY)[0].cached_tokens == 0
    assert_no_leak(engine)


def test_tokens_are_streamed_in_order_and_none_follows_an_abort(model):
    """One request aborts itself and a neighbour, which has a token in the same step."""
    engine, heard = Engine(model, num_pages=60), {"a": [], "b": [], "c": []}

    def listen(name):
        def on_token(token, logprob):
            heard[name].append((token, logprob))
            if len(heard["a"]) == 5 and name == "a":
                for request in requests[:2]:
                    engine.abort(request)

        return on_token

    requests = [
        engine.submit(prompt, GREEDY, listen(name))
        for name, prompt in (("a", [3]), ("b", [4]), ("c", [5]))
    ]
    finish(engine)
    assert [len(tokens) for tokens in heard.values()] == [5, 4, 20]
    for name, request in zip("abc", requests, strict=True):
        done = request.completion
        expected = list(zip(done.token_ids, done.logprobs, strict=True))
        assert heard[name] == expected[: len(heard[name])]
    assert [r.completion.finish_reason for r in requests] == ["abort", "abort", "length"]
    assert_no_leak(engine)


@pytest.mark.parametrize("raises", [False, True])
def test_a_failed_step_ends_its_requests_and_leaves_the_engine_whole(raises, monkeypatch):
    """NaN weights: what the step wrote reaches no later request, whatever error came."""
    model = make_model()
    engine = Engine(model, num_pages=9, page_size=4, max_batch_tokens=16)
    session = engine.session([5, 6, 7])
    history = [5, 6, 7] + session.sample(SamplingParams(max_tokens=2, temperature=0)).token_ids
    weight = model.layers[0].self_attn.qkv_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    request, waiting = engine.submit(range(9), GREEDY), engine.submit([8] * 17, GREEDY)
    if raises:
        monkeypatch.setattr(engine.runner, "read", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError if raises else NotFiniteError):
        engine.step()
    assert request.completion.finish_reason == ("abort" if raises else "error")
    assert raises or isinstance(request.error, NotFiniteError)
    engine.abort(waiting)
    monkeypatch.undo()
    with pytest.raises(FloatingPointError):
        engine.generate([[1, 2]], GREEDY)
    with torch.no_grad():
        weight.copy_(good)
    params = SamplingParams(max_tokens=10, temperature=0)
    assert engine.generate([[1, 2]], params)[0].token_ids == naive_sample(model, [1, 2], params)
    assert session.sample(params).token_ids == naive_sample(model, history, params)
    session.close()
    assert_no_leak(engine)


class BoomError(Exception):
    pass


class Fused(Guide):
    """A guide without a grammar, which raises where it is told to, at the third token."""

    def __init__(self, place):
        self.place, self.count = place, 0

    def copy(self):
        return Fused(self.place)

    def allowed(self):
        if self.place == "mask" and self.count == 2:
            raise BoomError
        return np.zeros(VOCAB, bool) if self.place == "empty mask" and self.count == 2 else None

    def advance(self, token):
        self.count += 1
        if self.place == "advance" and self.count == 3:
            raise BoomError


FAULTS = "admission", "mask", "empty mask", "advance", "callback", "last callback", "text"


def test_an_exception_of_one_request_ends_no_other(model, monkeypatch):
    """The others' tokens and log-probabilities are those of a run without the fault."""
    prompts = [[5, 6, 7], [9] * 13, [5, 6, 7, 8], list(range(40))]

    def run(faults):
        engine, heard = Engine(model, Letters(), num_pages=60, max_batch_tokens=24), []
        listen = lambda *token: heard.append(token)  # noqa: E731
        sound = [
            engine.submit(prompt, SamplingParams(max_tokens=24, seed=i, ignore_eos=True), listen)
            for i, prompt in enumerate(prompts)
        ]
        engine.step()
        bad = [submit_faulty(engine, fault, monkeypatch) for fault in faults]
        returned = []
        while engine.has_work:
            returned += engine.step()
            check_scheduler(engine.scheduler)
        assert sorted(map(id, returned)) == sorted(map(id, sound + bad))
        assert_no_leak(engine)
        results = [request.completed() for request in sound]
        for fault, request in zip(faults, bad, strict=True):
            assert request.completion.finish_reason == "error"
            with pytest.raises(UserError if fault == "empty mask" else BoomError):
                request.completed()
        return [(r.token_ids, r.logprobs, r.text) for r in results], sorted(heard)

    expected = run([])
    assert run(FAULTS) == expected and len(expected[1]) == 24 * len(prompts)


def submit_faulty(engine, fault, monkeypatch):
    """A request that raises at a place."""
    params, on_token = SamplingParams(max_tokens=6, seed=1, ignore_eos=True), None
    if fault in ("mask", "empty mask", "advance"):
        params = SamplingParams(max_tokens=6, guide=Fused(fault))
    if "callback" in fault:
        left = [6 if "last" in fault else 2]

        def on_token(*_):
            left[0] -= 1
            if not left[0]:
                raise BoomError

    request = engine.submit([1, 2, 3, 4, 96 - FAULTS.index(fault)], params, on_token)
    right = {"admission": engine.blocks.match, "text": engine.tokenizer.decode}.get(fault)
    if fault == "admission":

        def match(sequence):
            if sequence is request.sequence:
                raise BoomError
            return right(sequence)

        monkeypatch.setattr(engine.blocks, "match", match)
    if fault == "text":

        def decode(ids, **settings):
            if ids == request.ids[request.prompt_tokens :]:
                raise BoomError
            return right(ids, **settings)

        monkeypatch.setattr(engine.tokenizer, "decode", decode)
    return request


def test_other_misuse_is_explained(model):
    with pytest.raises(UserError, match="engine: num_pages is 0, it should be at least 1"):
        Engine(model, num_pages=0)
    engine = Engine(model, num_pages=3)
    with pytest.raises(UserError, match="1 sampling parameters for 2 prompts"):
        engine.generate([[1], [2]], [GREEDY])
    assert engine.generate([], GREEDY) == [] and engine.step() == []
    for prompt in ([1] * 20, [1] * 48):  # the pool has room for one token more than it has slots
        completion = engine.generate([prompt], SamplingParams(max_tokens=999, temperature=0))[0]
        assert len(completion.token_ids) == 49 - len(prompt)
        assert completion.finish_reason == "length"


def test_tool_calls_can_be_held_to_valid_json_and_known_names(nano_model, nano_tokenizer):
    """A model that knows no JSON and opens a call whenever it may, on pages that run out."""
    engine = Engine(nano_model, nano_tokenizer, num_pages=70)
    begin, end = nano_tokenizer.token_id("<tool_call>"), nano_tokenizer.token_id("</tool_call>")
    closing = [nano_tokenizer.bytes_of(i) in (b'"', b"}") for i in range(engine.num_drawable)]
    draw = engine.runner.draw

    def eager(launched):
        for row, request in zip(launched.logits, launched.requests, strict=True):
            if request.allowed_ids(engine.num_drawable) is None and begin not in request.ids:
                row[begin] = 1e3
            row[: engine.num_drawable][closing] += 4.0
        draw(launched)

    engine.runner.draw = eager
    names = ("calc", "search", "sea")
    guide = Guide(nano_tokenizer, Form([{"function": {"name": name}} for name in names]))
    engine.eos_ids |= {end}
    params = [SamplingParams(max_tokens=120, seed=i, guide=guide) for i in range(12)]
    completions = engine.generate([[5, 6, 7]] * 12, params)
    ended = [c.token_ids for c in completions if c.finish_reason == "stop"]
    assert len(ended) > 6
    for ids in ended:
        turn = chat.parse(nano_tokenizer, ids)
        assert [call.name in names and not call.error for call in turn.calls] == [True]
    assert_no_leak(engine)
