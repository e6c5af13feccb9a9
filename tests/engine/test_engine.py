"""The engine against a naive full forward, whatever it batches, shares, chunks or preempts."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from invariants import check_scheduler

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.sampler import draw_tokens
from nanorchestra.errors import NotFiniteError
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


def test_score_gives_the_log_probabilities_of_given_ids(model):
    """The output matrix has more rows than the tokenizer has ids."""
    tokenizer = SimpleNamespace(vocab_size=60, eos_ids=(59,))
    engine, prompts = Engine(model, tokenizer, num_pages=10), ragged_prompts()
    for ids, scores in zip(prompts, engine.score(prompts), strict=True):
        logprobs = naive_logits(model, ids)[:-1, :60].double().log_softmax(1)
        for value, row, token in zip(scores, logprobs, ids[1:], strict=True):
            expected = row[token].item() if token < 60 else -float("inf")
            assert value == pytest.approx(expected, abs=2e-5)
    assert engine.score([]) == [] and engine.score([[5]]) == [[]]


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


def test_nan_ends_the_requests_of_a_step_and_leaves_the_engine_whole():
    """What the step wrote reaches no later request."""
    model = make_model()
    engine = Engine(model, num_pages=9, page_size=4, max_batch_tokens=16)
    session = engine.session([5, 6, 7])
    history = [5, 6, 7] + session.sample(SamplingParams(max_tokens=2, temperature=0)).token_ids
    weight = model.layers[0].self_attn.qkv_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    request, waiting = engine.submit(range(9), GREEDY), engine.submit([8] * 17, GREEDY)
    with pytest.raises(NotFiniteError):
        engine.step()
    assert request.completion.finish_reason == "error"
    assert isinstance(request.error, NotFiniteError) and not waiting.finished
    engine.abort(waiting)
    with torch.no_grad():
        weight.copy_(good)
    params = SamplingParams(max_tokens=10, temperature=0)
    assert engine.generate([[1, 2]], params)[0].token_ids == naive_sample(model, [1, 2], params)
    assert session.sample(params).token_ids == naive_sample(model, history, params)
    session.close()
    assert_no_leak(engine)


class BoomError(Exception):
    pass


def test_an_exception_of_one_request_ends_no_other(model, monkeypatch):
    """It comes in a callback, or at the admission. The others are as in a run without it."""
    prompts = [[5, 6, 7], [9] * 13, [5, 6, 7, 8], list(range(40))]

    def raises(*token):
        raise BoomError

    def run(faulty):
        engine, bad = Engine(model, num_pages=60, max_batch_tokens=24), []
        params = [SamplingParams(max_tokens=24, seed=i) for i in range(len(prompts))]
        sound = [engine.submit(*pair) for pair in zip(prompts, params, strict=True)]
        engine.step()
        if faulty:
            bad = [engine.submit([1, 2, 3], GREEDY, raises), engine.submit([1, 2, 3], GREEDY)]
            right = engine.blocks.match
            monkeypatch.setattr(
                engine.blocks, "match", lambda s: raises() if s is bad[1].sequence else right(s)
            )
        finish(engine)
        assert_no_leak(engine)
        for request in bad:
            with pytest.raises(BoomError):
                request.completed()
        return [(r.completed().token_ids, r.completed().logprobs) for r in sound]

    assert run(faulty=True) == run(faulty=False)


def test_a_text_ends_where_the_pool_does(model):
    """The pool has room for one token more than it has slots: the last one needs none."""
    engine = Engine(model, num_pages=3)
    for prompt in ([1] * 20, [1] * 48):
        completion = engine.generate([prompt], SamplingParams(max_tokens=999, temperature=0))[0]
        assert len(completion.token_ids) == 49 - len(prompt)
        assert completion.finish_reason == "length"
