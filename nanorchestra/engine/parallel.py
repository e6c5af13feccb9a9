"""Tensor-parallel inference: one model on the ranks that `torchrun` has started, for sizes that do not fit one GPU.

Attention heads, feed-forward and the rows of the output matrix are divided over the ranks (Megatron-LM, Shoeybi et al. 2019, section 3):
two all-reduces a layer, one all-gather of the logits. Embeddings and norms stand on every rank; of Qwen3-32B in bf16 that is 1.56 GB.

Rank 0 has the engine: requests, sessions, scheduling and sampling are its business alone. What touches weights or KV pages it announces to
the others, which do the same with their part, so that there is nothing the ranks could disagree about. The process of a rank that fails
says why and ends, and as its connections close so do the others; if one hangs in the middle of a step, the rest end after a time-out.
"""

from __future__ import annotations

import atexit
import inspect
import io
import os
import pickle
import signal
import sys
import threading
import traceback
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanorchestra.engine.engine import Engine
from nanorchestra.engine.request import Request, SamplingParams
from nanorchestra.errors import UserError
from nanorchestra.model.ops import linear
from nanorchestra.model.quantise import Slot
from nanorchestra.model.qwen3 import Linear, ModelConfig, Qwen3
from nanorchestra.model.weights import hf_slots, load_model

if TYPE_CHECKING:
    from nanorchestra.model.tokenizer import Tokenizer

FOR_EVER = timedelta(days=10_000)
LAST_WORDS = 5  # seconds that rank 0 has after a failure to say and save what it must


def open_parallel(
    path: str | Path,
    device: str = "cpu",
    dtype: str = "float32",
    quantise: str | None = None,
    *,
    timeout: float = 600,
    **settings: Any,
) -> tuple[ParallelEngine, Tokenizer | None]:
    """Engine(*load_model(path, device, dtype, quantise), **settings) over all ranks, and the tokenizer. To be called on every rank alike.

    It returns on rank 0 only; the others stay in here, and exit when rank 0 closes the engine or ends. Device "cuda": each rank takes its
    own. timeout: the seconds that ranks wait for one another, but not for the next request. UserError, on rank 0 alone, for what load_model
    or Engine refuses on any rank, and for a number of ranks that the model cannot be divided by.
    """
    rank, ranks, limit = (
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        timedelta(seconds=timeout),
    )
    device = f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device
    dist.init_process_group("gloo" if device == "cpu" else "nccl", timeout=limit)
    link = _Link(
        dist.new_group(backend="gloo", timeout=FOR_EVER if rank else limit)
    )  # a user may think for an hour
    refusals: list[UserError | None] = [None] * ranks
    try:
        model, tokenizer = load_model(
            path, device, dtype, quantise, partial(ModelPart, rank=rank, ranks=ranks)
        )
        model.sum_outputs()
        if device != "cpu":
            torch.cuda.set_device(device)
        engine = (
            Engine(model, tokenizer, **settings)
            if rank
            else ParallelEngine(link, model, tokenizer, **settings)
        )
        dist.all_gather_object(refusals, None, group=link.control)
    except UserError as error:
        dist.all_gather_object(refusals, error, group=link.control)
    refusal = next(filter(None, refusals), None)
    if rank == 0:
        if refusal is not None:
            raise refusal
        return engine, tokenizer
    if refusal is None:
        link.follow(engine)
    sys.exit()


class ModelPart(Qwen3):
    """What one rank holds of a decoder. Called on all ranks at once it gives each what the whole would give, once `sum_outputs` is called.

    Invariant: `config` counts this rank's heads and feed-forward rows, but the whole vocabulary.
    """

    def __init__(self, whole: ModelConfig, rank: int, ranks: int):
        for field in ("num_key_value_heads", "intermediate_size", "vocab_size"):
            if getattr(whole, field) % ranks:
                raise UserError(
                    f"parallel: {ranks} ranks cannot divide {field} = {getattr(whole, field)} equally; start a number of ranks that does"
                )
        divided = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
        super().__init__(
            replace(whole, **{field: getattr(whole, field) // ranks for field in divided})
        )
        self.rank, self.ranks = rank, ranks
        if self.lm_head is not None:
            self.lm_head = Linear(whole.hidden_size, whole.vocab_size // ranks, bias=False)

    def sum_outputs(self) -> None:
        """The two projections into the residual stream give the sum over the ranks from now on. To be called when they are in their place."""
        for block in self.layers:
            for projection in (block.self_attn.o_proj, block.down_proj):
                projection.register_forward_hook(
                    lambda module, inputs, output: dist.all_reduce(output)
                )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, vocab]: each rank computes its part of the vocabulary, and all get the whole."""
        part = (
            linear(hidden, self.embed_tokens.weight.chunk(self.ranks)[self.rank])
            if self.lm_head is None
            else self.lm_head(hidden)
        )
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=1)

    def part_of(self, name: str, slot: Slot) -> Slot:
        """For weights.py: takes the whole tensor of that HF name, and writes what belongs to this rank to `slot`."""
        projection, kind = name.split(".")[-2:]
        by_input = projection in ("o_proj", "down_proj")
        if not by_input and projection not in (
            "q_proj",
            "k_proj",
            "v_proj",
            "gate_proj",
            "up_proj",
            "lm_head",
        ):
            return slot
        if by_input and kind == "bias":  # the outputs are summed, so only one may have it
            return (
                slot
                if self.rank == 0
                else replace(slot, write=lambda whole: slot.write(torch.zeros_like(whole)))
            )
        dimension = int(
            by_input == (kind in ("weight", "bias"))
        )  # AWQ's own tensors lie the other way round
        size = slot.shape[dimension]
        shape = [n * self.ranks if d == dimension else n for d, n in enumerate(slot.shape)]
        return replace(
            slot,
            shape=shape,
            write=lambda whole: slot.write(whole.narrow(dimension, self.rank * size, size)),
        )


class ParallelEngine(Engine):
    """Rank 0's engine: an Engine on its part of the model, which lets the others compute with theirs. A computation that fails ends them all."""

    def __init__(
        self, link: _Link, model: ModelPart, tokenizer: Tokenizer | None = None, **settings: Any
    ):
        super().__init__(model, tokenizer, **settings)
        self._link = link
        self.runner = _Announced(self.runner, link)
        atexit.register(self.close)

    def _score_pack(self, pack: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._link.call("_score_pack", super()._score_pack, [list(ids) for ids in pack])

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]] | None = None, *args: Any, **kwargs: Any
    ) -> int:
        """As Engine's, from whole tensors that rank 0 has. None says that every rank's part has been changed already."""
        return super().update_weights(
            None if tensors is None else self._spread(tensors), *args, **kwargs
        )

    def _spread(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Sends each tensor to the other ranks on its way here; one that does not fit goes no further, and is refused here."""
        slots = hf_slots(self.model)
        for name, tensor in tensors:
            if name in slots and list(tensor.shape) == slots[name].shape:
                tensor = tensor.detach().to(self.runner.device).contiguous()
                self._link.call("take", lambda *_: dist.broadcast(tensor, 0), name, tensor.dtype)
            yield name, tensor

    def close(self) -> None:
        """Lets the other ranks go; nothing can be computed afterwards. Closing twice is fine, and the end of the process closes too."""
        self._link.close()


class _Announced:
    """Rank 0's runner: each of its methods is called on all ranks."""

    def __init__(self, runner: Any, link: _Link):
        self._runner, self._link = runner, link

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._runner, name)
        return (
            partial(self._link.call, f"runner.{name}", value) if inspect.ismethod(value) else value
        )


class _Link:
    """The line from rank 0 to the others: a gloo group, or None once they have parted, in peace or by a `failure`."""

    def __init__(self, control: Any):
        self.control, self.wire = control, Wire()
        self.failure: BaseException | None = None
        self._calling = False

    def call(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """On rank 0: function(*args), while the others call with the same arguments what has this name in their engine."""
        if self._calling:  # within a call that the others are in as well
            return function(*args)
        if self.control is None:
            raise self.failure or RuntimeError("the parallel engine is closed")
        with _uninterrupted():
            try:
                self._send((name, args))
                self._calling = True
                return function(*args)
            except BaseException as error:
                error.add_note(
                    f"All ranks end after this, rank 0 in {LAST_WORDS} seconds. If it is about a connection, another rank says why."
                )
                self.control, self.failure = None, error
                end = threading.Timer(
                    LAST_WORDS, os._exit, (1,)
                )  # the others may wait in a collective until their connections close
                end.daemon = True
                end.start()
                raise
            finally:
                self._calling = False

    def follow(self, engine: Engine) -> None:
        """On the other ranks: does what rank 0 does until it closes. Ends the process if anything fails."""
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C reaches all ranks; rank 0 says what it means
        slots = hf_slots(engine.model)

        def take(name: str, dtype: torch.dtype) -> None:
            tensor = torch.empty(slots[name].shape, dtype=dtype, device=engine.runner.device)
            dist.broadcast(tensor, 0)
            slots[name].write(tensor)

        try:
            while (message := self._receive()) is not None:
                name, args = message
                with torch.inference_mode():
                    (take if name == "take" else attrgetter(name)(engine))(*args)
        except Exception:
            print(
                f"rank {dist.get_rank()} of the parallel engine ends: {traceback.format_exc()}",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # an orderly exit could wait for a collective that never ends
        dist.barrier(group=self.control)
        dist.destroy_process_group()

    def close(self) -> None:
        """On rank 0: the others stop following."""
        if self.control is not None:
            with suppress(RuntimeError):  # who has died need not be told
                self._send(None)
                dist.barrier(group=self.control)
            self.control = None
            dist.destroy_process_group()

    def _send(self, message: Any) -> None:
        dist.broadcast_object_list([self.wire.encode(message)], 0, group=self.control)

    def _receive(self) -> Any:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, 0, group=self.control)
        return self.wire.decode(box[0])


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end: who left a collective half-way would leave the others waiting in it."""
    pressed: list[bool] = []
    in_charge = (
        threading.current_thread() is threading.main_thread()
    )  # the only thread that signals interrupt
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True)) if in_charge else None
    try:
        yield
    finally:
        if in_charge:
            signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


class Wire:
    """Messages as bytes, for either end of the line. A request travels as its id and what it has got since the last message: token ids, and
    its pages if they are others. The receiver has a likeness of it, the same object for as long as every message that names requests names it:
    runners keep their rows in order by who it is. What lies between, a score or new weights, names none and is no reason to forget."""

    def __init__(self) -> None:
        self._known: dict[
            int, Any
        ] = {}  # by request id: the ids and pages sent, or the likeness received

    def encode(self, message: Any) -> bytes:
        """A message of requests and whatever can be pickled."""
        named: dict[int, tuple[int, list[int]]] = {}

        def describe(value: Any) -> tuple | None:
            if not isinstance(value, Request):
                return None
            sent, pages = named.get(value.id) or self._known.get(value.id, (0, []))
            named[value.id] = len(value.ids), list(value.table.pages)
            return (
                value.id,
                array("q", value.ids[sent:]),
                None if pages == value.table.pages else array("q", value.table.pages),
            )

        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = describe
        pickler.dump(message)
        self._known = named or self._known
        return buffer.getvalue()

    def decode(self, data: bytes) -> Any:
        """The message, with requests that have id, ids and pages and nothing else."""
        named: dict[int, Request] = {}

        def find(description: tuple) -> Request:
            number, ids, pages = description
            request = (
                named.get(number)
                or self._known.get(number)
                or Request(number, [], SamplingParams(), limit=0, stop_ids=frozenset())
            )
            request.ids += ids
            if pages is not None:
                request.table.pages[:] = pages
            named[number] = request
            return request

        unpickler = pickle.Unpickler(io.BytesIO(data))
        unpickler.persistent_load = find
        message = unpickler.load()
        self._known = named or self._known
        return message
