"""The engine against a naive full forward: whatever it batches, shares, chunks, preempts or resumes, the text and its log-probabilities
are those of the request alone."""

from __future__ import annotations

import random
import time
from functools import partial

import numpy as np
import pytest
import torch

from nanorchestra.engine.engine import Engine, SamplingParams
from nanorchestra.engine.sampler import Sampler
from nanorchestra.errors import UserError
from nanorchestra.model import chat
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.weights import named_hf_tensors

VOCAB = 97
CONFIG = ModelConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     head_dim=8, max_position_embeddings=512, rope_theta=10_000.0, tie_word_embeddings=False)  # fmt: skip
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
    with torch.inference_mode():
        return model.logits(
            model(
                torch.tensor(ids), torch.arange(len(ids)), packed_attention([Segment(0, len(ids))])
            )
        )


def naive_sample(model: Qwen3, prompt: list[int], params: SamplingParams, stop_ids=()) -> list[int]:
    """Token by token with a full forward each time; the noise is the sampler's."""
    ids, sampler = list(prompt), Sampler(VOCAB)
    while len(ids) < len(prompt) + params.max_tokens:
        ids += [draw.token for draw in sampler(naive_logits(model, ids)[-1:], [params], [len(ids)])]
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def naive_logprobs(
    model: Qwen3, prompt: list[int], sampled: list[int], temperature: float = 1.0
) -> torch.Tensor:
    logits = naive_logits(model, prompt + sampled)[len(prompt) - 1 : -1].double() / temperature
    return logits.log_softmax(1).gather(1, torch.tensor(sampled)[:, None])[:, 0]


def assert_logprobs(completion, expected: torch.Tensor) -> None:
    """Both are fp32 sums in different orders, and the initial attention of nano is sharp: rounding is amplified."""
    assert (torch.tensor(completion.logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


def assert_no_leak(engine: Engine) -> None:
    engine.scheduler.check()
    assert not engine.has_work and engine.cache.available == engine.cache.num_pages


def ragged_prompts() -> list[list[int]]:
    """A group of equal prompts, prompts with a common beginning, very short ones, and one longer than several tiles of queries."""
    rng = random.Random(0)
    word = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    common = word(45)
    return (
        [common + word(3)] * 3
        + [common + word(n) for n in (1, 20)]
        + [word(n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 200)]
        + [common]
    )


SETTINGS = {
    "usual": {},
    "chunked prefill": {"max_batch_tokens": 24},
    "few at a time": {"max_running": 3, "max_batch_tokens": 40},
    "pages of one": {"page_size": 1},
    "small pages": {"page_size": 4, "max_batch_tokens": 100},
    "a tiny pool": {"page_size": 4, "num_pages": 58, "max_batch_tokens": 64},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_greedy_equals_a_naive_full_forward(model, settings):
    engine, prompts = Engine(model, **{"num_pages": 1500} | settings), ragged_prompts()
    params = [
        SamplingParams(max_tokens=3 + 4 * (i % 8), temperature=0) for i in range(len(prompts))
    ]
    for prompt, p, completion in zip(prompts, params, engine.generate(prompts, params)):
        assert completion.token_ids == naive_sample(model, prompt, p)
        assert (completion.prompt_tokens, completion.finish_reason) == (len(prompt), "length")
        assert_logprobs(completion, naive_logprobs(model, prompt, completion.token_ids))
    assert engine.stats["preemptions"] == 0 or settings.get("num_pages")
    assert_no_leak(engine)


def test_a_tiny_pool_preempts_and_samples_the_same(model):
    prompts = [[i] * 30 for i in range(6)]
    params = [SamplingParams(max_tokens=30, seed=i) for i in range(6)]
    roomy, tiny = (
        Engine(model, num_pages=400, page_size=4),
        Engine(model, num_pages=45, page_size=4),
    )
    expected = [c.token_ids for c in roomy.generate(prompts, params)]
    assert [c.token_ids for c in tiny.generate(prompts, params)] == expected
    assert tiny.stats["preemptions"] > 0
    assert_no_leak(tiny)


def test_sampled_text_and_logprobs_are_those_of_the_request_alone(model):
    """Seeds and temperatures differ from row to row; the neighbours change, the text does not."""
    prompts = ragged_prompts()
    params = [
        SamplingParams(max_tokens=12, seed=i, temperature=(0.7, 1.0, 1.4)[i % 3])
        for i in range(len(prompts))
    ]
    together = Engine(model, num_pages=300).generate(prompts, params)
    for i in (0, 2, 4, 5, 13):
        alone = Engine(model, num_pages=300).generate([prompts[i]], params[i])[0]
        assert (
            alone.token_ids == together[i].token_ids == naive_sample(model, prompts[i], params[i])
        )
        assert_logprobs(
            together[i],
            naive_logprobs(model, prompts[i], together[i].token_ids, params[i].temperature),
        )


def test_truncated_sampling_reports_the_truncated_distribution(model):
    params = SamplingParams(max_tokens=10, top_k=7, top_p=0.8, temperature=1.3, seed=5)
    completion = Engine(model, num_pages=50).generate([[1, 2, 3]], params)[0]
    assert completion.token_ids == naive_sample(model, [1, 2, 3], params)
    full = naive_logprobs(model, [1, 2, 3], completion.token_ids, 1.3)
    assert all(
        reported > whole - 1e-9 for reported, whole in zip(completion.logprobs, full.tolist())
    )


def test_a_group_is_prefilled_once(model):
    engine, prompt = Engine(model, num_pages=300), list(range(90))  # five pages and ten tokens
    completions = engine.generate(
        [prompt] * 8, [SamplingParams(max_tokens=5, seed=i) for i in range(8)]
    )
    assert engine.stats["prefill_tokens"] == 90
    assert [c.cached_tokens for c in completions] == [0] + [90] * 7
    assert len({tuple(c.token_ids) for c in completions}) == 8
    again = engine.generate([prompt], SamplingParams(max_tokens=5, seed=3))[0]
    assert again.cached_tokens == 80 and again.token_ids == completions[3].token_ids


def test_sessions_of_a_group_prefill_only_what_is_new(model):
    engine, rng = Engine(model, num_pages=300), random.Random(0)
    prompt = [rng.randrange(VOCAB) for _ in range(70)]
    sessions, histories = (
        [engine.session(prompt) for _ in range(6)],
        [list(prompt) for _ in range(6)],
    )
    for turn in range(3):
        before = engine.stats["prefill_tokens"]
        given = [
            [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] if turn else []
            for _ in sessions
        ]
        for session, history, ids in zip(sessions, histories, given):
            session.append(ids)
            history += ids
        params = [SamplingParams(max_tokens=6 + i, seed=10 * turn + i) for i in range(6)]
        requests = [session.submit(p) for session, p in zip(sessions, params)]
        while engine.has_work:
            engine.step()
        for session, history, request, p in zip(sessions, histories, requests, params):
            assert request.completion.token_ids == naive_sample(model, history, p)
            assert_logprobs(
                request.completion, naive_logprobs(model, history, request.completion.token_ids)
            )
            history += request.completion.token_ids
            assert session.ids == history
        if turn:  # what was given, and the last sampled token of the turn before
            assert engine.stats["prefill_tokens"] - before == sum(len(ids) + 1 for ids in given)
    for session in sessions:
        session.close()
        session.close()
    assert_no_leak(engine)


def test_a_session_whose_pages_were_taken_goes_on_the_same(model):
    engine = Engine(model, num_pages=30, page_size=4)
    session = engine.session(range(40))
    first = session.sample(SamplingParams(max_tokens=5, seed=1))
    engine.generate([[9] * 100], GREEDY)
    assert engine.stats["revocations"] == 1
    session.append([4, 5])
    history = list(range(40)) + first.token_ids + [4, 5]
    assert session.sample(GREEDY).token_ids == naive_sample(model, history, GREEDY)
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
        session.sample(GREEDY)
    assert_no_leak(engine)


def test_stop_ids_end_the_text_and_belong_to_it(model):
    free = naive_sample(model, [5, 6], GREEDY)
    stop = free[7]
    at = free.index(stop) + 1
    completion = Engine(model, num_pages=30).generate(
        [[5, 6]], SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[stop])
    )[0]
    assert (completion.token_ids, completion.finish_reason, len(completion.logprobs)) == (
        free[:at],
        "stop",
        at,
    )
    engine = Engine(model, num_pages=30)
    engine.eos_ids = frozenset([stop])
    assert engine.generate([[5, 6]], GREEDY)[0].token_ids == free[:at]
    onward = engine.generate(
        [[5, 6]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    )[0]
    assert (onward.token_ids, onward.finish_reason) == (free, "length")


class Letters:
    """Ids are letters a..z, then digits; the ids from 60 on do not exist, and 59 is a special token that ends the text."""

    vocab_size, eos_ids = 60, (59,)

    def bytes_of(self, token: int) -> bytes:
        return bytes([97 + token % 26]) if token < 59 else b"<end>"

    def decode(self, ids, skip_special=False):
        return b"".join(self.bytes_of(i) for i in ids if not (skip_special and i == 59)).decode()


def test_the_tokenizer_gives_text_vocabulary_and_end(model):
    engine = Engine(model, Letters(), num_pages=60)
    completions = engine.generate(
        [[1]] * 60, [SamplingParams(max_tokens=40, seed=i) for i in range(60)]
    )
    assert max(max(c.token_ids) for c in completions) < 60
    for c in completions:
        assert c.text == Letters().decode(c.token_ids, skip_special=True)
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == 59) and 59 not in c.token_ids[:-1]
        expected = (
            naive_logits(model, [1] + c.token_ids)[:-1, :60]
            .double()
            .log_softmax(1)
            .gather(1, torch.tensor(c.token_ids)[:, None])
        )
        assert_logprobs(c, expected[:, 0])
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_stop_strings_cut_the_text_and_not_the_ids(model):
    engine = Engine(model, Letters(), num_pages=60)
    whole = engine.generate([[1, 2]], SamplingParams(max_tokens=30, seed=4, ignore_eos=True))[0]
    stop = whole.text[10:13]
    cut = engine.generate(
        [[1, 2]], SamplingParams(max_tokens=30, seed=4, ignore_eos=True, stop=("never there", stop))
    )[0]
    end = whole.text.index(stop)
    assert cut.text == whole.text[:end] and cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)] and Letters().decode(
        cut.token_ids, True
    ).endswith(stop)


def test_score_gives_the_log_probabilities_of_given_ids(model):
    engine, prompts = Engine(model, Letters(), num_pages=10, max_batch_tokens=70), ragged_prompts()
    for ids, scores in zip(prompts, engine.score(prompts), strict=True):
        expected = naive_logits(model, ids)[:-1, :60].double()
        expected = expected.gather(
            1, torch.tensor(ids[1:], dtype=torch.int64).clamp(max=59)[:, None]
        )[:, 0] - expected.logsumexp(1)
        for value, target, given in zip(scores, expected.tolist(), ids[1:]):
            assert (
                value == pytest.approx(target, abs=2e-5) if given < 60 else value == -float("inf")
            )
    assert engine.score([]) == [] and engine.score([[5]]) == [[]]
    assert_no_leak(engine)


def test_new_weights_take_effect_and_old_pages_never_match(model):
    own, other, prompt = make_model(0), make_model(1), list(range(50))
    engine = Engine(own, num_pages=60)
    session = engine.session(prompt)
    old = session.sample(GREEDY)
    history = list(session.ids)
    assert engine.update_weights(named_hf_tensors(other)) == engine.weight_version == 1
    completion = engine.generate([prompt], GREEDY)[0]
    assert (
        completion.cached_tokens == 0
        and completion.token_ids == naive_sample(other, prompt, GREEDY) != old.token_ids
    )
    assert set(old.weight_versions) == {0} and completion.weight_versions == [1] * 20
    assert session.sample(GREEDY).token_ids == naive_sample(other, history, GREEDY)
    session.close()
    assert engine.update_weights() == 2
    assert engine.generate([prompt], GREEDY)[0].cached_tokens == 0
    assert_no_leak(engine)


def test_weights_are_not_changed_under_a_request_unless_it_is_said_what_becomes_of_it(model):
    engine = Engine(model, num_pages=60)
    request = engine.submit([1, 2], GREEDY)
    with pytest.raises(UserError, match="1 requests are in flight"):
        engine.update_weights()
    with pytest.raises(UserError, match="inflight is 'wait'"):
        engine.update_weights(inflight="wait")
    engine.step()
    engine.update_weights(inflight="abort")
    assert request.completion.finish_reason == "abort" and request.completion.weight_versions == [0]
    assert_no_leak(engine)


@pytest.mark.parametrize("inflight", ["recompute", "keep"])
def test_requests_go_on_under_new_weights(inflight):
    """A running group, one request that waits, a session that is parked: each token is that of the weights of its version."""
    old, new = make_model(0), make_model(1)
    engine, prompt = Engine(make_model(0), num_pages=60, max_running=4), list(range(40))
    parked = engine.session(prompt)
    history = parked.sample(GREEDY).token_ids
    requests = [engine.submit(prompt, SamplingParams(max_tokens=12, seed=i)) for i in range(5)]
    for _ in range(4):
        engine.step()
    engine.update_weights(named_hf_tensors(new), inflight=inflight)
    engine.scheduler.check()
    late = engine.submit(prompt, SamplingParams(max_tokens=12, seed=9))
    while engine.has_work:
        engine.step()
    assert late.completion.token_ids == naive_sample(new, prompt, late.params)
    assert [r.completion.weight_versions for r in requests] == [[0] * 4 + [1] * 8] * 4 + [[1] * 12]
    for request in requests:
        ids, versions = request.completion.token_ids, request.completion.weight_versions
        before = versions.count(0)
        assert ids[:before] == naive_sample(old, prompt, request.params)[:before]
        rest = SamplingParams(max_tokens=12 - before, seed=request.params.seed)
        recomputed = naive_sample(new, prompt + ids[:before], rest)
        if inflight == "recompute" or not before:
            assert ids[before:] == recomputed
        else:  # the prompt's KV is the old weights': the text is neither's alone
            assert ids[before:] != recomputed
    answer = parked.sample(GREEDY)
    assert answer.cached_tokens == (len(prompt + history) - 1 if inflight == "keep" else 32)
    if inflight == "recompute":
        assert answer.token_ids == naive_sample(new, prompt + history, GREEDY)
    parked.close()
    assert_no_leak(engine)


def test_the_kv_memory_can_be_lent(model):
    engine, prompt = Engine(model, num_pages=60), list(range(40))
    session = engine.session(prompt)
    history = prompt + session.sample(GREEDY).token_ids
    running = engine.submit(prompt, GREEDY)
    engine.step()
    engine.sleep()
    engine.sleep()
    assert engine.runner.k_cache.untyped_storage().nbytes() == 0
    with pytest.raises(UserError, match="it sleeps"):
        engine.step()
    assert len(engine.score([prompt])[0]) == 39
    waiting = engine.submit(prompt + [1], GREEDY)
    engine.wake()
    while engine.has_work:
        engine.step()
    assert running.completion.token_ids == naive_sample(model, prompt, GREEDY)
    assert waiting.completion.token_ids == naive_sample(model, prompt + [1], GREEDY)
    assert session.sample(GREEDY).token_ids == naive_sample(model, history, GREEDY)
    session.close()
    assert_no_leak(engine)


def test_a_session_can_be_forked(model):
    engine, prompt = Engine(model, num_pages=60), list(range(37))
    trunk = engine.session(prompt)
    history = prompt + trunk.sample(GREEDY).token_ids
    branches = [trunk, trunk.fork(), trunk.fork()]
    before = engine.stats["prefill_tokens"]
    for i, branch in enumerate(branches):
        branch.append([i, i])
    requests = [branch.submit(GREEDY) for branch in branches]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    assert engine.stats["prefill_tokens"] - before == 3 * 3
    for i, request in enumerate(requests):
        assert request.completion.token_ids == naive_sample(model, history + [i, i], GREEDY)
    for branch in branches:
        branch.close()
    assert_no_leak(engine)


def test_the_longest_gap_between_two_tokens_of_a_running_request_is_reported(model):
    engine = Engine(model, num_pages=60)
    for _ in range(2):  # nobody waits in between
        engine.generate([[1, 2]], SamplingParams(max_tokens=1))
        time.sleep(0.02)
    assert engine.stats["longest_gap_seconds"] == 0
    request = engine.submit([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    time.sleep(0.02)
    while not request.finished:
        engine.step()
    assert 0.02 <= engine.stats["longest_gap_seconds"] < 10


def test_the_most_probable_ids_are_reported_if_asked_for(model):
    completion = Engine(model, num_pages=60).generate(
        [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0, top_logprobs=3)
    )[0]
    assert [top[0] for top in completion.top_logprobs] == list(
        zip(completion.token_ids, completion.logprobs)
    )
    assert [len(top) for top in completion.top_logprobs] == [3] * 4


def test_tokens_are_streamed_in_order_and_none_follows_an_abort(model):
    engine, seen, other = Engine(model, num_pages=60), [], []

    def on_token(token, logprob):
        seen.append((token, logprob))
        if len(seen) == 5:
            engine.abort(request)

    request = engine.submit([3, 4], GREEDY, on_token)
    follower = engine.submit([3, 4, 5], GREEDY, lambda token, logprob: other.append(token))
    while engine.has_work:
        engine.step()
    assert (
        seen == list(zip(request.completion.token_ids, request.completion.logprobs))
        and len(seen) == 5
    )
    assert request.completion.finish_reason == "abort"
    assert other == follower.completion.token_ids == naive_sample(model, [3, 4, 5], GREEDY)
    assert_no_leak(engine)


def test_a_callback_that_raises_harms_only_its_own_request(model):
    engine = Engine(model, num_pages=60)
    bad = engine.submit([3], GREEDY, lambda token, logprob: 1 / 0)
    good = engine.submit([4], GREEDY)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    while engine.has_work:
        engine.step()
    assert bad.completion.finish_reason == "abort" and good.completion.token_ids == naive_sample(
        model, [4], GREEDY
    )
    assert_no_leak(engine)


def test_a_failed_step_aborts_its_requests_and_leaves_the_engine_whole():
    """NaN weights: the error is raised, and what the step wrote to the pages does not reach anyone later."""
    model = make_model()
    engine = Engine(model, num_pages=6, page_size=4)
    weight = model.layers[0].self_attn.qkv_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    request = engine.submit(range(9), GREEDY)
    with pytest.raises(FloatingPointError):
        engine.step()
    assert request.completion.finish_reason == "abort"
    assert_no_leak(engine)
    with torch.no_grad():
        weight.copy_(good)
    params = SamplingParams(max_tokens=10, temperature=0)
    assert engine.generate([[1, 2]], params)[0].token_ids == naive_sample(model, [1, 2], params)


@pytest.mark.parametrize("ids, says", [
    ([], "empty"),
    ([1] * 64, "64 tokens, the context of 64 leaves room for 63"),
    ([VOCAB], f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    ([3, -1], "token id -1"),
    ([1] * 50, "50 tokens do not fit the KV pool of 48 tokens"),
])  # fmt: skip
def test_a_prompt_that_can_never_be_served_is_refused_at_once(model, ids, says):
    engine = Engine(model, num_pages=3, max_context=64)
    for refused in (
        lambda: engine.submit(ids, GREEDY),
        lambda: engine.session(ids).submit(GREEDY),
        lambda: engine.generate([[1], ids], GREEDY),
    ):
        with pytest.raises(UserError, match=says):
            refused()
    assert_no_leak(engine)


NO_IDS = [
    [1.5],
    [float("nan")],
    [True, 1],
    [None],
    [[3]],
    ["a"],
    "hello",
    7,
    None,
    {3, 4},
    np.array([1.0]),
    torch.tensor([[1, 2]]),
    torch.tensor(3),
    [torch.tensor(3)],
    [10**30],
]


@pytest.mark.parametrize("ids", NO_IDS, ids=repr)
def test_what_are_no_ids_is_refused_at_once_and_harms_nobody(model, ids):
    """An id that is no integer would fail in the step, and end the requests of everybody in it."""
    engine = Engine(model, num_pages=6)
    neighbour = engine.submit([4], GREEDY)
    session = engine.session([3])
    for refused in (
        lambda: engine.submit(ids, GREEDY),
        lambda: engine.generate([[1], ids], GREEDY),
        lambda: engine.score([[1], ids]),
        lambda: engine.session(ids),
        lambda: session.append(ids),
    ):
        with pytest.raises(
            UserError, match=rf"^prompt: (token id|it is) .*, it should be .*{VOCAB - 1}"
        ):
            refused()
    assert session.ids == [3] and session.sample(GREEDY).token_ids == naive_sample(
        model, [3], GREEDY
    )
    while engine.has_work:
        engine.step()
    assert neighbour.completion.token_ids == naive_sample(model, [4], GREEDY)
    session.close()
    assert_no_leak(engine)


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        [np.int64(1), 2, 3],
    ],
    ids=repr,
)
def test_ids_may_come_in_any_sequence_of_integers(model, ids):
    engine = Engine(model, num_pages=6)
    session = engine.session()
    session.append(ids)
    assert (
        engine.generate([ids], GREEDY)[0].token_ids
        == session.sample(GREEDY).token_ids
        == naive_sample(model, [1, 2, 3], GREEDY)
    )
    assert all(type(i) is int for i in session.ids) and engine.score([ids]) == engine.score(
        [[1, 2, 3]]
    )


@pytest.mark.parametrize("settings, most, says", [
    ({"num_pages": 10, "max_context": 64}, 63, "64 tokens, the context of 64 leaves room for 63"),
    ({"num_pages": 3, "max_context": 64}, 48, "49 tokens do not fit the KV pool of 48 tokens"),
])  # fmt: skip
def test_a_prompt_of_exactly_the_limit_is_served(model, settings, most, says):
    """Its one token is the last that the context or the pool has room for."""
    engine, prompt = Engine(model, **settings), [5 * i % VOCAB for i in range(most)]
    (completion,) = engine.generate([prompt], GREEDY)
    assert (
        completion.token_ids
        == naive_sample(model, prompt, SamplingParams(max_tokens=1, temperature=0))
        and completion.finish_reason == "length"
    )
    with pytest.raises(UserError, match=says):
        engine.submit(prompt + [1], GREEDY)
    assert_no_leak(engine)


def test_text_ends_where_the_context_or_the_pool_does(model):
    for settings, room in (({"num_pages": 100, "max_context": 30}, 30), ({"num_pages": 2}, 33)):
        completion = Engine(model, **settings).generate(
            [[1] * 20], SamplingParams(max_tokens=999, temperature=0)
        )[0]
        assert len(completion.token_ids) == room - 20 and completion.finish_reason == "length"
        assert completion.token_ids == naive_sample(
            model, [1] * 20, SamplingParams(max_tokens=room - 20, temperature=0)
        )


def test_other_misuse_is_explained(model):
    with pytest.raises(UserError, match="num_pages is 0"):
        Engine(model, num_pages=0)
    engine = Engine(model, num_pages=3)
    with pytest.raises(UserError, match="no tokenizer"):
        engine.submit([1], SamplingParams(stop="x"))
    with pytest.raises(UserError, match="1 sampling parameters for 2 prompts"):
        engine.generate([[1], [2]], [GREEDY])
    assert engine.generate([], GREEDY) == [] and engine.step() == []


@pytest.mark.parametrize("seed", range(3))
def test_storm(model, seed):
    """Requests, sessions and aborts in any order, some by who hears a token, on a small pool: every text that ended by itself is the naive one,
    nothing is heard of a request after its abort, and nothing leaks."""
    rng = random.Random(seed)
    engine = Engine(
        model, num_pages=26, page_size=4, max_batch_tokens=rng.choice((12, 64)), max_running=6
    )
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1, 7, 24, 40)]
    sessions, open_turns, requests, aborted, ended = [], {}, [], set(), []

    def abort(request):
        aborted.update([request] if not request.finished else [])
        engine.abort(request)

    def listen(index, token):
        request, *_, heard = requests[index]
        assert request not in aborted
        heard.append(token)
        if rng.random() < 0.05:
            abort(rng.choice(requests)[0])

    def add(submit, prompt, params):
        index = len(requests)
        requests.append(
            (submit(params, lambda token, logprob: listen(index, token)), list(prompt), params, [])
        )

    def step():
        ended.extend(engine.step())
        engine.scheduler.check()

    for _ in range(120):
        kind = rng.random()
        params = SamplingParams(max_tokens=rng.randrange(1, 12), seed=rng.randrange(3))
        if kind < 0.12:
            prompt = rng.choice(prompts)
            add(partial(engine.submit, prompt), prompt, params)
        elif kind < 0.2 and len(sessions) < 4:
            sessions.append(engine.session(rng.choice(prompts)))
        elif kind < 0.32 and sessions:
            session = rng.choice(sessions)
            if len(session.ids) > 80:
                if not open_turns[session].finished:
                    aborted.add(open_turns[session])
                session.close()
                sessions.remove(session)
            elif session not in open_turns or open_turns[session].finished:
                session.append([rng.randrange(VOCAB) for _ in range(rng.randrange(5))])
                add(session.submit, session.ids, params)
                open_turns[session] = requests[-1][0]
        elif kind < 0.38 and requests:
            abort(rng.choice(requests)[0])
        else:
            step()
    while engine.has_work:
        step()
    for session in sessions:
        session.close()
    assert_no_leak(engine)
    assert sorted(ended, key=id) == sorted(
        (request for request, *_ in requests if request not in aborted), key=id
    )
    for request, prompt, params, heard in requests:
        assert heard == request.completion.token_ids[: len(heard)] and (request in aborted) == (
            request.completion.finish_reason == "abort"
        )
        if request not in aborted:
            assert heard == request.completion.token_ids
            limit = SamplingParams(
                max_tokens=min(params.max_tokens, 105 - len(prompt)), seed=params.seed
            )
            assert request.completion.token_ids == naive_sample(model, prompt, limit)


def test_tool_calls_can_be_held_to_valid_json_and_known_names(nano_model, nano_tokenizer):
    """A model that knows no JSON, and opens a call whenever it may, on pages that are taken from it now and then."""
    engine, begin = (
        Engine(nano_model, nano_tokenizer, num_pages=70),
        nano_tokenizer.token_id("<tool_call>"),
    )
    logits = engine.runner.logits

    def eager(plan):
        out = logits(plan)
        for row, request in zip(out, plan.sampling):
            if (
                request.grammar is not None
                and not request.grammar_state.in_call
                and begin not in request.ids
            ):
                row[begin] = 1e3
            row[
                [nano_tokenizer.bytes_of(i) in (b'"', b"}") for i in range(engine.vocab_size)]
                + [False] * (len(row) - engine.vocab_size)
            ] += 4.0
        return out

    engine.runner.logits = eager
    names = ("calc", "search", "sea")
    params = [
        SamplingParams(
            max_tokens=120,
            seed=i,
            tools=names,
            enable_thinking=False,
            stop_token_ids=(nano_tokenizer.tool_call_end,),
        )
        for i in range(12)
    ]
    completions = engine.generate([[5, 6, 7]] * 12, params)
    ended = [
        chat.parse(nano_tokenizer, c.token_ids, enable_thinking=False)
        for c in completions
        if c.finish_reason == "stop"
    ]
    assert len(ended) > 6
    for turn in ended:
        assert len(turn.calls) == 1 and not turn.calls[0].error and turn.calls[0].name in names
    free = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20, seed=1))[0]
    assert free.token_ids != completions[1].token_ids[:20]
    with pytest.raises(UserError, match="tools is .* no tokenizer"):
        Engine(nano_model).submit([1], SamplingParams(tools=("a",)))
    assert_no_leak(engine)


def test_no_token_follows_an_abort_by_a_neighbour_in_the_same_step(model):
    engine, seen = Engine(model, num_pages=60), []
    victim = None

    def on_token(token, logprob):
        if len(engine.scheduler.running) == 2 and len(victim.ids) == 6:
            engine.abort(victim)

    engine.submit([3, 4], GREEDY, on_token)
    victim = engine.submit([3, 4, 5], GREEDY, lambda token, logprob: seen.append(token))
    while engine.has_work:
        engine.step()
    assert (
        victim.completion.finish_reason == "abort"
        and len(victim.completion.token_ids) == 3
        and len(seen) == 2
    )
    assert_no_leak(engine)
