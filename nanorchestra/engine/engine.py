"""The inference engine: ids in, sampled ids and log-probabilities out. It knows tokens; text appears only in a completion.

`Engine.generate` samples a batch; `submit` and `step` are the loop beneath it, for streaming; `Session` keeps a conversation's KV across
tool calls; `score` gives log-probabilities; `update_weights` takes new weights in place. Not thread-safe: one thread owns an engine.
"""

from __future__ import annotations

import itertools
import reprlib
import time
from functools import cached_property
from typing import TYPE_CHECKING, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.guide import ToolCallGrammar
from nanorchestra.engine.request import (
    PENDING,
    Completion,
    OnToken,
    Request,
    SamplingParams,
    StopText,
)
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw, Sampler
from nanorchestra.engine.scheduler import Plan, Scheduler
from nanorchestra.errors import UserError
from nanorchestra.model.packed_attention import Segment, packed_attention
from nanorchestra.model.weights import copy_weights

if TYPE_CHECKING:
    from nanorchestra.engine.gpu import Drawn

__all__ = ["Completion", "Engine", "Request", "SamplingParams", "Session"]

_DEFAULT_POOL_BYTES = 1 << 30


class Engine:
    """Continuous batching over a paged KV cache.

    num_pages: pages of the KV pool (default: 1 GiB worth). page_size: tokens a page (default: 16 on a CPU, 64 on a GPU). max_batch_tokens:
    tokens one step computes at most. max_running: requests that decode at the same time (no more than max_batch_tokens). max_context:
    longest sequence, prompt and sampled ids together (default: the model's max_position_embeddings). kernels: compute by Triton kernels and
    captured graphs (gpu.py; default: on a GPU). attention: what computes that of chunks on a GPU: triton,
    flash-attn, or auto, which times both (kernels/external.py). The model may be shared with a trainer; after changing its weights in place
    call `update_weights()`.
    """

    def __init__(
        self,
        model,
        tokenizer=None,
        *,
        num_pages: int | None = None,
        page_size: int | None = None,
        max_batch_tokens: int = 4096,
        max_running: int = 512,
        max_context: int | None = None,
        kernels: bool | None = None,
        attention: str = "auto",
    ):
        config, on_gpu = model.config, model.embed_tokens.weight.is_cuda
        for name, value in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("max_batch_tokens", max_batch_tokens),
            ("max_running", max_running),
            ("max_context", max_context),
        ):
            if value is not None and value < 1:
                raise UserError(f"engine: {name} is {value}, it should be at least 1")
        if page_size is None:
            page_size = 64 if on_gpu else 16
        if num_pages is None:
            token_bytes = (
                2
                * config.num_hidden_layers
                * config.num_key_value_heads
                * config.head_dim
                * model.embed_tokens.weight.element_size()
            )
            num_pages = max(1, _DEFAULT_POOL_BYTES // (page_size * token_bytes))
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.vocab_size = (
            config.vocab_size if tokenizer is None else min(tokenizer.vocab_size, config.vocab_size)
        )
        self.eos_ids = frozenset(config.eos_token_ids if tokenizer is None else tokenizer.eos_ids)
        self.max_context = min(
            max_context or config.max_position_embeddings, config.max_position_embeddings
        )
        self.weight_version = 0
        self.cache = PageCache(num_pages, page_size)
        self.scheduler = Scheduler(self.cache, max_batch_tokens, max_running)
        if on_gpu if kernels is None else kernels:
            from nanorchestra.engine.gpu import GpuRunner  # Triton is needed for this alone

            self.runner: Runner = GpuRunner(
                model, num_pages, page_size, self.vocab_size, on_gpu, attention
            )
        else:
            self.runner = Runner(model, num_pages, page_size)
        self.sampler = Sampler(self.vocab_size)
        self._ids = itertools.count()
        self._asleep = False
        self._ahead: tuple[Plan, Drawn] | None = (
            None  # a step that is computed before the last one's draws are read
        )
        self._counts = {
            "steps": 0,
            "prefill_tokens": 0,
            "sampled_tokens": 0,
            "cached_tokens": 0,
            "longest_gap_seconds": 0.0,
        }
        self._delivered = 0.0  # when the last step's tokens were there

    # sampling

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Samples each prompt to its end; the completions in the same order. Equal prompts share their prefill.

        UserError if a prompt cannot be served: then none is.
        """
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise UserError(
                f"generate: {len(params)} sampling parameters for {len(prompts)} prompts, there should be one each"
            )
        requests = [self._request(ids, p) for ids, p in zip(prompts, params)]
        for request in requests:
            self.scheduler.add(request)
        try:
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.abort(request)
        return [request.completion for request in requests]

    def submit(
        self, ids: Sequence[int], params: SamplingParams, on_token: OnToken | None = None
    ) -> Request:
        """Queues one request; `step` serves it. on_token(token id, logprob) is called for each sampled token, in order.

        UserError if it can never be served: what is no id of the vocabulary, or a prompt longer than the context or than the pool.
        """
        request = self._request(ids, params, on_token)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Computes one step; returns the requests that finished in it. Without work it does nothing.

        If the computation fails, the step's requests are aborted and the error is raised. If an on_token callback raises, its request is
        aborted and the error is raised after everyone else's tokens have been delivered.
        """
        if self._asleep:
            raise UserError(
                "engine: it sleeps, its KV memory is lent; call wake() before the next step"
            )
        plan, drawn = self._ahead or (Plan(), None)
        self._ahead = None
        plan.decodes = [
            request for request in plan.decodes if not request.finished
        ]  # some have ended since the step was launched
        if not plan.decodes:
            plan, drawn = self.scheduler.plan(), None
        if not plan.decodes and not plan.prefills:
            return []
        sampling = plan.sampling
        try:
            with torch.inference_mode():
                if self.runner.fused and sampling:
                    drawn = drawn or self.runner.launch(plan)
                    if self._predictable(plan):
                        self._look_ahead(plan, drawn)
                    draws = self.runner.draws(
                        drawn, sampling, self.sampler, self._allowed(sampling)
                    )
                else:
                    logits = self.runner.logits(plan)
                    positions = [len(request.ids) for request in sampling]
                    draws = (
                        self.sampler(
                            logits,
                            [request.params for request in sampling],
                            positions,
                            self._allowed(sampling),
                        )
                        if sampling
                        else []
                    )
        except BaseException:
            self._ahead = None
            self._look_back(plan)
            try:  # beyond what counts as written stands this step's KV, and the next one's
                self.runner.erase(
                    [
                        (
                            r,
                            r.table.written,
                            len(r.table.pages) * self.cache.page_size - r.table.written,
                        )
                        for r in plan.requests
                    ]
                )
            finally:
                for request in plan.requests:
                    self._finish(request, "abort")
            raise
        self._look_back(plan)
        self.scheduler.commit(plan)
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += sum(count for _, _, count in plan.prefills)
        self._counts["sampled_tokens"] += len(draws)
        finished = []
        for request, draw in zip(sampling, draws):
            reason = request.accept(draw.token, draw.logprob, self.weight_version)
            if request.params.top_logprobs:
                request.top_logprobs.append(draw.top_logprobs)
            if reason:
                self._finish(request, reason)
                finished.append(request)
        self._deliver(sampling, draws)
        return finished

    def _predictable(self, plan: Plan) -> bool:
        """Whether the next step is known before this one's draws are, unless somebody stops: all decode, nobody waits or reaches a limit, and
        there are pages for all, so that nobody gives way whose newest id is not known."""
        return (
            not plan.prefills
            and not plan.forks
            and not self.scheduler.waiting
            and all(
                len(request.ids) + 1 < request.limit
                and request.grammar is None
                and request.params.plain
                for request in plan.decodes
            )
            and sum(
                self.cache.missing(request.table, len(request.ids) + 1) for request in plan.decodes
            )
            <= self.cache.available
        )

    def _look_ahead(self, plan: Plan, drawn: Drawn) -> None:
        """Launches the step after `plan`, so that the device works while the host reads what `plan` drew. Who stops in it is left out of the
        next step's draws; what that step wrote for him lies in pages that are free again. Thrown away, the step is planned anew."""
        for request in plan.decodes:
            request.ids.append(PENDING)
            request.table.written += 1
        ahead = self.scheduler.plan()
        self._ahead = ahead, self.runner.launch(ahead, drawn)

    def _look_back(self, plan: Plan) -> None:
        """Again nothing counts as known or written that has not been drawn: `plan` is still to be committed, or has failed."""
        for request in plan.decodes:
            if request.ids[-1] == PENDING:
                request.ids.pop()
            request.table.written = len(request.ids) - 1

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def abort(self, request: Request) -> None:
        """Ends a request in any state: its pages are free at once and no token follows. A finished one stays as it is."""
        self._finish(request, "abort")

    def session(self, ids: Sequence[int] = ()) -> Session:
        """A growing sequence of ids whose KV stays in the cache between its turns."""
        return Session(self, ids)

    # log-probabilities and weights

    def score(self, list_of_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p(ids[i + 1] | ids[:i + 1]) at temperature 1 over the ids the sampler can draw (minus infinity for others): n - 1 numbers for
        n ids. Uses no pages. UserError for an empty list, what is no id of the vocabulary, or more ids than the context holds."""
        list_of_ids = [self._checked(ids) for ids in list_of_ids]
        for ids in list_of_ids:
            self._check_length(ids, self.max_context)
        scores: list[list[float]] = []
        pack: list[Sequence[int]] = []
        for ids in list_of_ids:
            if pack and sum(map(len, pack)) + len(ids) > self.scheduler.max_batch_tokens:
                scores += self._score_pack(pack)
                pack = []
            pack.append(ids)
        return scores + (self._score_pack(pack) if pack else [])

    @torch.inference_mode()
    def _score_pack(self, pack: Sequence[Sequence[int]]) -> list[list[float]]:
        device = self.runner.device
        starts = list(itertools.accumulate(map(len, pack), initial=0))
        tokens = torch.tensor([i for ids in pack for i in ids], device=device)
        positions = torch.cat([torch.arange(len(ids)) for ids in pack]).to(device)
        segments = [Segment(start, len(ids)) for start, ids in zip(starts, pack)]
        hidden = self.model(tokens, positions, packed_attention(segments))
        values = []
        for part, targets in zip(hidden[:-1].split(1024), tokens[1:].split(1024)):
            values += self.sampler.score(self.model.logits(part), targets)
        return [values[start : start + len(ids) - 1] for start, ids in zip(starts, pack)]

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]] | None = None, inflight: str = "refuse"
    ) -> int:
        """Copies all (Hugging Face name, tensor) pairs into the model in place; returns the new weight version.

        None says that the model has been changed already. KV computed before never matches again. `inflight` says what becomes of
        requests that wait or run. "refuse": UserError if there are any, since their tokens would come from two policies. "abort": they end
        with what they have. "recompute": they go on by the new weights, on KV computed anew. "keep": they and the sessions go on by the new
        weights on the KV they have (Piché et al. 2025, arXiv 2509.19128). Each token's version is recorded. ValueError if the tensors are
        not the model's.
        """
        requests = self.scheduler.waiting + self.scheduler.running
        if inflight not in ("refuse", "abort", "recompute", "keep"):
            raise UserError(
                f"update_weights: inflight is {inflight!r}, it should be refuse, abort, recompute or keep"
            )
        if requests and inflight == "refuse":
            raise UserError(
                f"update_weights: {len(requests)} requests are in flight, there should be none: finish or abort them first, or say "
                "inflight='abort', 'recompute' or 'keep'"
            )
        self._ahead = None
        for request in requests if inflight == "abort" else ():
            self.abort(request)
        try:
            if tensors is not None:
                copy_weights(self.model, tensors)
        finally:  # a copy that failed half-way has changed the weights too
            self.weight_version += 1
            self.scheduler.set_version(self.weight_version, keep=inflight == "keep")
        return self.weight_version

    def sleep(self) -> None:
        """Gives the memory of the KV pool back, to a trainer say, until `wake`. Requests and sessions stay, and compute their KV anew then;
        meanwhile requests are taken, and `score` and `update_weights` work, but `step` is a UserError. Sleeping twice is fine."""
        self._asleep, self._ahead = True, None
        self.scheduler.set_version(self.weight_version)
        self.runner.sleep()

    def wake(self) -> None:
        """Takes the KV pool's memory again. If there is too little, the error is torch's and the engine still sleeps."""
        if self._asleep:
            self.runner.wake()
            self._asleep = False

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the start, the longest that a running request waited for its next token, and how full the engine is now."""
        return self._counts | {
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "parked_sessions": len(self.scheduler.parked),
            "preemptions": self.scheduler.preemptions,
            "revocations": self.scheduler.revocations,
            "pages": self.cache.num_pages,
            "pages_available": self.cache.available,
            "weight_version": self.weight_version,
        }

    # inside

    def _request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        table: PageTable | None = None,
        session: int = -1,
    ) -> Request:
        capacity = (
            self.cache.num_pages * self.cache.page_size + 1
        )  # the last sampled token needs no page
        ids = self._checked(ids)
        self._check_length(ids, self.max_context - 1)
        if len(ids) > capacity - 1:
            raise UserError(
                f"prompt: {len(ids)} tokens do not fit the KV pool of {capacity - 1} tokens (num_pages={self.cache.num_pages})"
            )
        for name in ("stop", "tools"):
            if getattr(params, name) and self.tokenizer is None:
                raise UserError(
                    f"sampling parameters: {name} is {getattr(params, name)!r}, but the engine has no tokenizer"
                )
        grammar = self._grammar if params.tools else None
        return Request(
            id=next(self._ids),
            ids=ids,
            params=params,
            prompt_tokens=len(ids),
            on_token=on_token,
            limit=min(len(ids) + params.max_tokens, self.max_context, capacity),
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.eos_ids),
            stop_text=StopText(params.stop, self.tokenizer) if params.stop else None,
            table=table if table is not None else PageTable(),
            keeps_pages=table is not None,
            resumed=bool(table and table.pages),
            session=session,
            grammar=grammar,
            grammar_state=grammar.start(params.tools, params.enable_thinking) if grammar else None,
        )

    @cached_property
    def _grammar(self) -> ToolCallGrammar:
        return ToolCallGrammar(self.tokenizer)

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """A list of `ids`, which may be an array or a tensor too. UserError if one of them is no id: in a step it would fail its neighbours."""
        ids, size = (
            ids.tolist() if isinstance(ids, (np.ndarray, Tensor)) else ids,
            self.config.vocab_size,
        )
        if not isinstance(ids, Sequence):
            raise UserError(
                f"prompt: it is {reprlib.repr(ids)}, it should be a sequence of token ids, integers from 0 to {size - 1}"
            )
        kinds = set(map(type, ids))
        if (
            not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds)
            or ids
            and (min(ids) < 0 or max(ids) >= size)
        ):
            bad = next(
                i
                for i in ids
                if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or not 0 <= i < size
            )
            raise UserError(
                f"prompt: token id {reprlib.repr(bad)} is outside the vocabulary of {size}, it should be an integer from 0 to {size - 1}"
            )
        return list(ids) if kinds <= {int} else [int(i) for i in ids]

    def _check_length(self, ids: list[int], limit: int) -> None:
        if not ids:
            raise UserError("prompt: it is empty, there should be at least one token")
        if len(ids) > limit:
            raise UserError(
                f"prompt: {len(ids)} tokens, the context of {self.max_context} leaves room for {limit}"
            )

    def _finish(self, request: Request, reason: str) -> None:
        if request.finished:
            return
        self.scheduler.finish(request, reason)
        ids = request.ids[request.prompt_tokens :]
        text = (
            request.stop_text.text
            if request.stop_text
            else self.tokenizer.decode(ids, skip_special=True)
            if self.tokenizer
            else ""
        )
        self._counts["cached_tokens"] += request.cached_tokens or 0
        request.completion = Completion(
            request.prompt_tokens,
            request.cached_tokens or 0,
            ids,
            request.logprobs,
            text,
            reason,
            request.weight_versions,
            request.top_logprobs,
        )

    def _allowed(self, sampling: list[Request]) -> list[np.ndarray | None]:
        return [
            request.grammar.allowed(request.grammar_state) if request.grammar else None
            for request in sampling
        ]

    def _deliver(self, sampling: list[Request], draws: list[Draw]) -> None:
        failure, last, self._delivered = None, self._delivered, time.perf_counter()
        if any(len(request.logprobs) > 1 for request in sampling):
            self._counts["longest_gap_seconds"] = max(
                self._counts["longest_gap_seconds"], self._delivered - last
            )
        for request, draw in zip(sampling, draws):
            if request.on_token is None or request.finish_reason == "abort":
                continue
            try:
                request.on_token(draw.token, draw.logprob)
            except Exception as error:
                self.abort(request)
                failure = failure or error
        if failure is not None:
            raise failure


class Session:
    """One conversation's ids, append-only. Between turns its KV stays in the cache, so a turn computes only what was appended.

    Under memory pressure the engine may take the pages of a session that waits; its next turn then computes them anew.
    """

    def __init__(self, engine: Engine, ids: Sequence[int] = ()):
        self._engine, self._ids, self._table = engine, engine._checked(ids), PageTable()
        self._request: Request | None = None
        self._first = -1  # the id of its first request: its age
        self._closed = False

    @property
    def ids(self) -> list[int]:
        """All ids so far, given and sampled; those of an open turn are added when it finishes."""
        if self._request is not None and self._request.finished:
            self._ids, self._request = self._request.ids, None
        return self._ids

    def append(self, ids: Sequence[int]) -> None:
        """Adds given ids: a tool's result, a user's message. UserError while a turn is being sampled, and for what is no id: then none is added."""
        self._settled().extend(self._engine._checked(ids))

    def submit(self, params: SamplingParams, on_token: OnToken | None = None) -> Request:
        """Starts a turn; once it is finished its sampled ids are part of `ids`. UserError as for Engine.submit, or if a turn is open."""
        request = self._engine._request(self._settled(), params, on_token, self._table, self._first)
        self._engine.scheduler.add(request)
        self._first = request.session
        self._request = request
        return request

    def fork(self) -> Session:
        """Another session that goes on from here; the KV so far is shared, and a page is copied when one of them writes into it."""
        other = Session(self._engine, self._settled())
        other._first = next(self._engine._ids)
        self._engine.scheduler.fork(self._table, other._table, other._first)
        return other

    def sample(self, params: SamplingParams) -> Completion:
        """One turn, waited for; other requests go on meanwhile, and those that finish keep their completion."""
        request = self.submit(params)
        while not request.finished:
            self._engine.step()
        return request.completion

    def close(self) -> None:
        """Gives the pages back and aborts an open turn. The ids stay readable, but nothing more can be sampled. Closing twice is fine."""
        self._closed = True
        if self._request is not None:
            self._engine.abort(self._request)
        self._engine.scheduler.close(self._table)

    def _settled(self) -> list[int]:
        ids = self.ids
        if self._closed:
            raise UserError("session: it is closed; open a new one")
        if self._request is not None:
            raise UserError("session: a turn is being sampled; wait for it to finish, or abort it")
        return ids
