"""Two ranks give what one process gives, whatever is asked of the engine; and when one of them fails, all end and say why.

Run as a program, `test_parallel.py DIRECTORY DEED`, this file is one rank: it opens the checkpoint and does the deed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from nanorchestra.engine.cache import PageTable
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.gpu import GpuRunner
from nanorchestra.engine.parallel import ModelPart, ParallelEngine, Wire, open_parallel
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.engine.scheduler import Plan
from nanorchestra.errors import UserError
from nanorchestra.model.quantise import QuantisedLinear, Slot
from nanorchestra.model.qwen3 import ModelConfig, Qwen3
from nanorchestra.model.weights import load_model, named_hf_tensors, read_config, save_checkpoint

VOCAB = 96
CONFIG = ModelConfig(
    VOCAB, 32, 48, 2, 4, 2, head_dim=8, max_position_embeddings=512, rope_theta=10_000.0
)
BIASED, TIED = (
    dataclasses.replace(CONFIG, attention_bias=True),
    dataclasses.replace(CONFIG, tie_word_embeddings=True),
)
SETTINGS = {
    "num_pages": 70,
    "page_size": 4,
    "max_batch_tokens": 48,
}  # so small that prompts come in chunks and pages change hands
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def make_model(config: ModelConfig, seed: int = 0) -> Qwen3:
    model = Qwen3(config)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            elif parameter.dim() == 2:
                parameter.mul_(8)  # far from uniform, so that a wrong weight changes the text
    return model


@pytest.fixture(scope="module", params=[BIASED, TIED], ids=["biased", "tied"])
def checkpoint(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("parallel") / "checkpoint"
    save_checkpoint(make_model(request.param), None, path, max_shard_bytes=8000)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save_checkpoint(make_model(CONFIG), None, path)
    return path


# Parts of a model


def load_parts(path: Path, ranks: int = 2, **options) -> list[Qwen3]:
    return [
        load_model(path, build=partial(ModelPart, rank=rank, ranks=ranks), **options)[0]
        for rank in range(ranks)
    ]


def test_the_parts_make_the_whole(checkpoint):
    whole, parts = load_model(checkpoint)[0], load_parts(checkpoint)
    for (name, tensor), *pieces in zip(
        named_hf_tensors(whole), *map(named_hf_tensors, parts), strict=True
    ):
        first, second = (piece for _, piece in pieces)
        if name.endswith("o_proj.bias"):  # the outputs are summed
            assert torch.equal(first, tensor) and not second.any()
        elif first.shape == tensor.shape:
            assert (
                name.endswith(("norm.weight", "embed_tokens.weight"))
                and torch.equal(first, tensor)
                and torch.equal(second, tensor)
            )
        else:
            assert torch.equal(
                torch.cat(
                    (first, second), dim=int(name.endswith(("o_proj.weight", "down_proj.weight")))
                ),
                tensor,
            ), name
            assert 2 * first.numel() == tensor.numel()


def test_quantised_parts_are_rounded_as_the_whole_is(checkpoint):
    """A row of int8 has one scale, so the matrices divided by rows are the same to the bit."""
    whole, parts = (
        load_model(checkpoint, quantise="int8")[0],
        load_parts(checkpoint, quantise="int8"),
    )
    for name, module in whole.named_modules():
        if isinstance(module, QuantisedLinear) and name.endswith("gate_up_proj"):
            halves = [part.get_submodule(name).dequantise(torch.float32).chunk(2) for part in parts]
            assert torch.equal(
                torch.cat([half[i] for i in (0, 1) for half in halves]),
                module.dequantise(torch.float32),
            )


@pytest.mark.parametrize("name, shape, dimension", [
    ("q_proj.weight", [6, 5], 0), ("k_proj.bias", [6], 0), ("v_proj.qweight", [5, 6], 1), ("up_proj.scales", [5, 6], 1),
    ("o_proj.weight", [6, 5], 1), ("down_proj.qzeros", [5, 6], 0), ("down_proj.scales", [5, 6], 0),
])  # fmt: skip
def test_a_tensor_is_divided_along_heads_or_feed_forward(name, shape, dimension):
    """AWQ's own tensors too, which lie [in, out]."""
    written = []
    slot = ModelPart(CONFIG, 1, 2).part_of(
        f"model.layers.0.block.{name}", Slot(shape, False, written.append)
    )
    assert slot.shape == [2 * n if d == dimension else n for d, n in enumerate(shape)]
    whole = torch.rand(slot.shape)
    slot.write(whole)
    assert torch.equal(written[0], whole.chunk(2, dimension)[1])


def test_a_number_of_ranks_that_does_not_divide_the_model_is_refused():
    with pytest.raises(UserError, match="3 ranks cannot divide num_key_value_heads = 2"):
        ModelPart(CONFIG, 0, 3)


# What rank 0 tells the others


class TwoRunners:
    """Every call of the one is made on the other too, with what has come over the wire, and must give the same."""

    fused = False

    def __init__(self, first, second):
        self.first, self.second, self.sender, self.receiver = first, second, Wire(), Wire()
        self.device = first.device

    def __getattr__(self, name):
        def call(*args):
            method, likenesses = self.receiver.decode(self.sender.encode((name, args)))
            ours, theirs = (
                getattr(self.first, name)(*args),
                getattr(self.second, method)(*likenesses),
            )
            assert ours is None or torch.equal(ours, theirs)
            assert rows(self.first) == rows(self.second), (
                "the ranks would add up what belongs to different tokens"
            )
            return ours

        return call


def rows(runner) -> list:
    """The order in which the decodes of its next step will stand."""
    if isinstance(runner, GpuRunner):
        return [request.id for request in runner._batch[1]]
    return [[request.id for request in batch.rows] for batch in runner._batches]


def test_who_hears_the_plans_computes_the_same():
    model = make_model(CONFIG)
    engine = Engine(model, **SETTINGS)
    engine.runner = runners = TwoRunners(engine.runner, Engine(model, **SETTINGS).runner)
    everything(engine, CONFIG)
    assert torch.equal(runners.first.k_cache, runners.second.k_cache)


def test_decodes_keep_their_order_when_new_weights_put_them_back_to_prefill(monkeypatch):
    """By the GPU's runner (without the computation), which groups its rows anew for other requests only."""

    def forward(self, decodes, chunks):
        return torch.zeros(
            len(decodes.rows if decodes else ()) + len(chunks.tokens if chunks else ()),
            CONFIG.hidden_size,
        )

    monkeypatch.setattr(GpuRunner, "_forward", forward)
    model = make_model(CONFIG)
    engine = Engine(model, page_size=16, num_pages=40, max_batch_tokens=40)
    engine.runner = TwoRunners(*(GpuRunner(model, 40, 16, VOCAB, graphs=False) for _ in range(2)))
    requests = [
        engine.submit(range(start, start + n), SamplingParams(max_tokens=30))
        for start, n in ((0, 40), (50, 12))
    ]
    while len(requests[1].ids) < 20:  # a page is full now, which was not when they were grouped
        engine.step()
    engine.update_weights(inflight="recompute")
    while engine.has_work:
        engine.step()


def test_a_long_context_is_told_once():
    sender, receiver = Wire(), Wire()
    request = Request(
        5,
        list(range(9000)),
        GREEDY,
        limit=0,
        stop_ids=frozenset(),
        on_token=lambda *_: None,
        table=PageTable(list(range(600))),
    )
    plan = Plan(decodes=[request], forks=[(request, request)])
    likeness = receiver.decode(sender.encode(plan)).decodes[0]
    for token in range(20):
        request.ids.append(token)
        if token == 5:
            request.table.pages[3] = 999  # a page found twice is given back
        if token == 10:
            del request.table.pages[4:]
        message = sender.encode(plan)
        assert len(message) < (500 if token != 5 else 9000)
        heard = receiver.decode(message)
        assert heard.decodes[0] is likeness and heard.forks[0] == (likeness, likeness)
        assert (likeness.id, likeness.ids, likeness.table.pages) == (
            5,
            request.ids,
            request.table.pages,
        )
    receiver.decode(sender.encode("no plan"))
    assert receiver.decode(sender.encode(plan)).decodes[0] is likeness
    other = Request(6, [1, 2], GREEDY, limit=0, stop_ids=frozenset())
    receiver.decode(sender.encode(Plan(decodes=[other])))
    again = receiver.decode(sender.encode(plan)).decodes[0]
    assert again is not likeness and again.ids == request.ids


# One process and two


def everything(engine: Engine, config: ModelConfig) -> list:
    """What comes of using all that an engine offers, in lists of numbers."""
    rng, results = random.Random(0), []
    word = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731

    def note(*completions):
        results.extend(x for c in completions for x in (c.token_ids, c.logprobs))

    common = word(21)
    prompts = [common] * 3 + [common + word(7), word(1), word(60), word(100), word(90)]
    params = [
        SamplingParams(
            max_tokens=18, seed=i, temperature=(0.0, 1.0, 0.8)[i % 3], top_p=(1.0, 0.9)[i % 2]
        )
        for i in range(len(prompts))
    ]
    note(*engine.generate(prompts, params))

    session = engine.session(word(30))
    note(session.sample(params[1]))
    session.append(word(9))  # what a tool said
    other = session.fork()
    other.append(word(2))
    note(session.sample(params[2]), other.sample(params[3]))
    note(*engine.generate([word(200)], params[0]))
    session.append(word(5))
    note(session.sample(params[4]))

    aborted, finished = (
        engine.submit(word(10), params[0]),
        engine.submit(word(12), params[0], lambda token, logprob: engine.abort(aborted)),
    )
    with pytest.raises(UserError, match="outside the vocabulary"):
        engine.submit([VOCAB], params[0])
    while engine.has_work:
        engine.step()
    note(aborted.completion, finished.completion)
    results += engine.score([prompts[3], prompts[4], prompts[6]])
    with pytest.raises(UserError, match="empty"):
        engine.score([[]])

    tensors = dict(named_hf_tensors(make_model(config, seed=1)))
    unfinished = [
        engine.submit(word(n), dataclasses.replace(params[n], max_tokens=40)) for n in (2, 3, 4)
    ]
    for _ in range(4):
        engine.step()
    older = other.submit(
        dataclasses.replace(params[1], max_tokens=40)
    )  # decodes in a batch of its own, which comes after theirs
    for _ in range(3):
        engine.step()
    results += engine.score([prompts[3]])
    engine.step()
    with pytest.raises(ValueError, match="no parameter model.nonsense"):
        engine.update_weights(
            [*list(tensors.items())[:4], ("model.nonsense", torch.zeros(3))], inflight="keep"
        )
    assert engine.update_weights(tensors.items(), inflight="keep") == 2
    while engine.has_work:
        engine.step()
    note(
        older.completion,
        *(request.completion for request in unfinished),
        *engine.generate(prompts[:4], params[:4]),
    )
    engine.sleep()
    engine.wake()
    note(session.sample(params[5]), *engine.generate(prompts[:2], params[:2]))
    assert (
        engine.stats["preemptions"]
        and engine.stats["revocations"]
        and engine.stats["cached_tokens"]
    )
    session.close()
    other.close()
    engine.scheduler.check()
    return results + [
        [value for name, value in sorted(engine.stats.items()) if name != "longest_gap_seconds"]
    ]


def torchrun(ranks: int, *arguments) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
        __file__,
        *arguments,
    ]
    return subprocess.run(
        list(map(str, command)), env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.mark.slow
def test_two_ranks_give_what_one_process_gives(checkpoint):
    run = torchrun(2, checkpoint, "everything")
    assert run.returncode == 0, run.stderr
    theirs = json.loads(run.stdout)
    ours = everything(Engine(load_model(checkpoint)[0], **SETTINGS), read_config(checkpoint))
    for one, two in zip(ours, theirs, strict=True):
        assert two == pytest.approx(one, abs=1e-5)


@pytest.mark.slow
def test_a_bad_number_of_ranks_is_one_line_and_a_failure(small):
    run = torchrun(3, small, "everything")
    lines = [
        line
        for line in run.stderr.splitlines()
        if "3 ranks cannot divide num_key_value_heads = 2 equally" in line
    ]
    assert (
        run.returncode != 0 and len(lines) == 1 and "Traceback" not in run.stderr.split(lines[0])[0]
    )


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all(small):
    run = torchrun(2, small, "rank 1 hangs")
    assert run.returncode != 0 and "Timed out waiting" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("deed, codes, says", [
    ("rank 0 pauses, is interrupted, goes on, fails", (1, 0), "ZeroDivisionError"),        # beside the engine: the others go in peace
    ("rank 0 fails in a step and goes on", (1, 1), "still MemoryError('here')"),
    ("rank 1 fails in a step", (1, 1), "MemoryError: here"),
    ("rank 1 is killed", (1, -signal.SIGKILL), "another rank says why"),
])  # fmt: skip
def test_when_one_rank_fails_all_end(deed, codes, says, small):
    """Also where no torchrun looks after them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = ENVIRONMENT | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": "2",
        }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, small, deed],
            env=where | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert tuple(rank.returncode for rank in ranks) == codes, said
    assert says in said[deed == "rank 1 fails in a step"], said


# What a rank does


def main(path: str, deed: str) -> None:
    torch.set_num_threads(1)
    if deed.startswith(f"rank {os.environ['RANK']}"):
        misbehave(deed)
    try:
        engine, _ = open_parallel(
            path, timeout=10 if "pauses" in deed or "hangs" in deed else 60, **SETTINGS
        )
    except UserError as error:
        sys.exit(str(error))
    assert isinstance(engine, ParallelEngine)  # the other ranks do not get here
    if deed == "everything":
        return print(json.dumps(everything(engine, read_config(path))))
    if "pauses" in deed:
        time.sleep(12)  # longer than ranks wait for one another
    try:
        engine.generate([[1, 2, 3]], GREEDY)
    except KeyboardInterrupt:
        assert len(engine.generate([[1, 2, 3]], GREEDY)[0].token_ids) == GREEDY.max_tokens
        1 / 0
    except MemoryError:
        try:
            engine.generate([[1, 2, 3]], GREEDY)
        except MemoryError as error:
            print(f"still {error!r}", file=sys.stderr)
        time.sleep(100)


def misbehave(deed: str) -> None:
    """The third computation of this rank goes wrong in the way that the deed says."""
    forward, calls = ModelPart.forward, []

    def bad(self, *args):
        calls.append(1)
        if len(calls) == 3:
            if "interrupted" in deed:
                signal.raise_signal(signal.SIGINT)
            elif "killed" in deed:
                signal.raise_signal(signal.SIGKILL)
            elif "hangs" in deed:
                time.sleep(90)
            else:
                raise MemoryError("here")
        return forward(self, *args)

    ModelPart.forward = bad


if __name__ == "__main__":
    main(*sys.argv[1:])
