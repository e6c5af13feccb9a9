"""The inference engine: ids in, sampled ids and log-probabilities out.

`Engine.generate` samples a batch. `submit` and `step` are the loop beneath it, for streaming.
`session` keeps a conversation's KV across tool calls, `score` gives log-probabilities, and
`update_weights` takes new weights in place. Not thread-safe: one thread owns an engine.

A step is a batch of the scheduler, and four calls: the runner launches it, draws its tokens and
reads them, and the requests accept them. Two methods say in which order, `_serial_step` for a CPU
and `_overlapped_step` for a GPU; both give the same tokens.
"""

import itertools
import math
from collections.abc import Collection, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.cpu_runner import CpuRunner
from nanorchestra.engine.gpu_runner import GpuRunner
from nanorchestra.engine.runner import Launched, Runner
from nanorchestra.engine.sampler import Draw, Result
from nanorchestra.engine.scheduler import Batch, Scheduler
from nanorchestra.engine.score import score
from nanorchestra.engine.sequence import (
    Completion,
    Limits,
    OnToken,
    Request,
    SamplingParams,
    Sequence,
)
from nanorchestra.engine.session import Session
from nanorchestra.errors import NotFiniteError, require
from nanorchestra.model import ops
from nanorchestra.model.checkpoint import copy_weights
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer

Results = dict[Request, Result]


class Engine:
    """Continuous batching over a paged KV cache.

    num_pages: pages of the KV pool (default: 1 GiB worth on a CPU; on a GPU a share of what is free
    once steps have run). page_size: tokens a page (default: 16 on a CPU, 64 on a GPU).
    max_batch_tokens: tokens that one step computes at most. max_running: requests that decode at
    the same time. max_context: longest sequence, prompt and sampled ids together (default: the
    model's). Raises UserError for a number below 1.

    The model may be shared with a trainer. Call `update_weights()` after changing it in place. On a
    CPU, `pack` it before the engine is made.
    """

    def __init__(
        self,
        model: Qwen3,
        tokenizer: Tokenizer | None = None,
        *,
        num_pages: int | None = None,
        page_size: int | None = None,
        max_batch_tokens: int = 4096,
        max_running: int = 512,
        max_context: int | None = None,
    ):
        config = model.config
        longest = config.max_position_embeddings
        self.max_context = longest if max_context is None else min(max_context, longest)
        for name, value in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("max_batch_tokens", max_batch_tokens),
            ("max_running", max_running),
            ("max_context", self.max_context),
        ):
            wrong = value is not None and value < 1
            require(not wrong, f"engine: {name} is {value}, it should be at least 1")
        max_running = min(max_running, max_batch_tokens)  # each decode takes a token of a step

        self.model, self.tokenizer = model, tokenizer
        # A prompt may hold any id of the embeddings; only those of the tokenizer are drawn.
        self.num_drawable = config.vocab_size
        # The chat format says what ends a turn. Without one, config.json says what ends a text.
        self.eos_ids = frozenset(config.eos_token_ids)
        if tokenizer is not None:
            self.num_drawable = min(self.num_drawable, tokenizer.vocab_size)
            self.eos_ids = frozenset(tokenizer.eos_ids or config.eos_token_ids)
        self.weight_version = 0
        self.runner: Runner
        if ops.by_kernel(model.embed_tokens.weight):
            self.runner = GpuRunner(
                model,
                self.num_drawable,
                num_pages,
                page_size,
                max_batch_tokens,
                max_running,
                self.max_context,
            )
        else:
            self.runner = CpuRunner(model, self.num_drawable, num_pages, page_size)
        self.blocks = BlockManager(self.runner.num_pages, self.runner.page_size)
        self.scheduler = Scheduler(self.blocks, max_batch_tokens, max_running)
        pool = self.runner.num_pages * self.runner.page_size
        self.limits = Limits(config.vocab_size, self.max_context, pool)
        self._request_ids = itertools.count()
        # Launched and drawn by the last call of `step`, accepted by the next one.
        self._ahead: Launched | None = None
        self._counts = {"steps": 0, "prefill_tokens": 0, "sampled_tokens": 0}

    # Requests.

    def generate(
        self,
        prompts: Collection[Iterable[int]],
        params: SamplingParams | Collection[SamplingParams],
    ) -> list[Completion]:
        """Samples each prompt to its end. Returns the completions in the same order.

        Equal prompts share their full pages; give them different seeds. Raises UserError if a
        prompt cannot be served, and then serves none; NotFiniteError if the model computes NaN.
        """
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        require(
            len(params) == len(prompts),
            f"generate: {len(params)} sampling parameters for {len(prompts)} prompts, "
            "there should be one each",
        )
        requests = [self.make_request(*pair) for pair in zip(prompts, params, strict=True)]
        for request in requests:  # once all are known to be right
            self.scheduler.add(request)
        try:
            while not all(request.finished for request in requests):
                self.step()
        finally:  # after an error or an interrupt
            for request in requests:
                self.abort(request)
        return [request.completed() for request in requests]

    def submit(
        self, ids: Iterable[int], params: SamplingParams, on_token: OnToken | None = None
    ) -> Request:
        """Queues a request, which `step` serves. Calls on_token(token id, logprob) for each token.

        Raises UserError if it can never be served: an id outside the vocabulary, or a prompt
        longer than the context or the pool. A callback that raises ends its own request.
        """
        request = self.make_request(ids, params, on_token)
        self.scheduler.add(request)
        return request

    def session(self, ids: Iterable[int]) -> Session:
        """Opens a growing sequence of ids whose KV stays in the cache between its turns."""
        return Session(self, ids)

    def make_request(
        self,
        ids: Iterable[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
    ) -> Request:
        """Checks what a caller gives and makes the request. Raises UserError.

        Any thread may call this.
        """
        own = Sequence(self.limits.check_ids(ids))
        return self.make_request_on(own, params, on_token)

    def make_request_on(
        self, sequence: Sequence, params: SamplingParams, on_token: OnToken | None = None
    ) -> Request:
        """Makes a request that samples on a sequence of checked ids. Raises UserError."""
        length = len(sequence.ids)
        self.limits.check_length(length, sampled=1)
        return Request(
            id=next(self._request_ids),
            sequence=sequence,
            params=params,
            # The last token needs no page.
            limit=min(length + params.max_tokens, self.max_context, self.limits.pool + 1),
            stop_ids=frozenset() if params.ignore_eos else self.eos_ids,
            on_token=on_token,
        )

    @property
    def has_work(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def abort(self, request: Request) -> None:
        """Ends a request in any state: its pages are free at once and no token follows.

        A finished request stays as it is.
        """
        if not request.finished:
            self._finish(request, "abort")

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request by an error of its own, as `abort` does; `completed` then raises it.

        If it has finished in this step and its callback raised, its completion is made anew.
        """
        has_ended = request.finished
        request.finish("error", self.tokenizer, error)
        if not has_ended:
            self.scheduler.finish(request)

    def _finish(self, request, reason):
        request.finish(reason, self.tokenizer)
        self.scheduler.finish(request)  # last: `_abandon` finds what an interrupt leaves undone

    # A step.

    def step(self) -> list[Request]:
        """Computes one step, if there is work, and calls back.

        Returns the requests that ended in it by a stop, a limit or an error. A caller knows what it
        has aborted.

        An exception while a request is admitted, guided, decoded or told of its token ends that
        request alone: it finishes with reason "error", and `Request.error` is the exception. If the
        step itself fails or is interrupted, all its requests are aborted, the cache is emptied, and
        the error is raised. So it is by NotFiniteError if logits are not finite, which is then the
        error of all requests that the step samples. A callback must not call `step`.
        """
        try:
            with torch.inference_mode():
                if self.runner.overlaps:
                    batch, results, self._ahead = self._overlapped_step(self._ahead)
                else:
                    batch, results = self._serial_step()
        except BaseException:
            self._abandon()
            raise
        for request in batch.sampled:
            if request.on_token is not None:
                self._call_back(request, results[request])
        ended = [request for request in [*batch.failed, *batch.sampled] if request.finished]
        return [request for request in ended if request.completion.finish_reason != "abort"]

    def _serial_step(self) -> tuple[Batch, Results]:
        """Computes a step from its plan to its tokens. Returns the batch and its draws."""
        batch = self._plan()
        if batch.empty:
            return batch, {}
        launched = self.runner.launch(batch)
        self.runner.draw(launched)
        self.scheduler.commit(batch)
        return batch, self._accept(launched)

    def _overlapped_step(self, launched: Launched | None) -> tuple[Batch, Results, Launched | None]:
        """Computes a step, but launches the next one before it reads the tokens of this one.

        launched: the step that the last call has launched ahead, if it has. Returns the batch and
        its draws, and the step for the next call.

        The GPU then computes while the host reads, and the newest ids go from one step to the next
        on the device. The step is committed before the next one is planned (`schedule_ahead`): what
        it writes is there for all that comes later on the device. The next step is drawn once the
        tokens before it are accepted, because masks and noise depend on these. The callbacks come
        after that, so the GPU works meanwhile.
        """
        if launched is not None:
            self._leave_out_ended(launched.batch)
            if launched.batch.empty:
                self._drop_ahead()
                launched = None
        if launched is None:
            batch = self._plan()
            if batch.empty:
                return batch, {}, None
            launched = self.runner.launch(batch)
            self.runner.draw(launched)
        self.scheduler.commit(launched.batch)
        ahead = None
        batch_ahead = self.scheduler.schedule_ahead()
        if batch_ahead is not None:
            self._fail_unadmitted(batch_ahead)
            launched.batch.failed |= batch_ahead.failed
            batch_ahead.failed = {}  # they are told with this step, and not again with their own
            if not batch_ahead.empty:
                ahead = self.runner.launch(batch_ahead, previous=launched)
        results = self._accept(launched)
        if ahead is not None:
            self.runner.draw(ahead)
        return launched.batch, results, ahead

    def _plan(self) -> Batch:
        """Schedules the next batch. A request whose admission raised has failed."""
        batch = self.scheduler.schedule()
        self._fail_unadmitted(batch)
        return batch

    def _fail_unadmitted(self, batch: Batch):
        for request, error in batch.failed.items():
            self.fail(request, error)

    def _leave_out_ended(self, batch: Batch):
        """Takes out of a batch that was launched ahead the requests that have ended since.

        Such a request still has a row or a chunk in the step, which is ignored. It wrote the KV of
        the request's ids where they belong. If the pages are free again, only a later step can hand
        them out, and that comes later on the device; a session writes the same there once more.
        """
        batch.decodes = [request for request in batch.decodes if not request.finished]
        batch.prefills = [chunk for chunk in batch.prefills if not chunk.request.finished]

    def _drop_ahead(self):
        """Forgets the step launched ahead, once it has been computed.

        What the caller does next, to the weights say, may be on another stream.
        """
        if self._ahead is not None:
            self._ahead = None
            self.runner.wait()

    def _accept(self, launched: Launched) -> Results:
        """Reads the draws of a step and gives the requests their tokens. Returns the draws."""
        batch = launched.batch
        sampled = batch.sampled
        results = self.runner.read(launched)
        self._check_finite(sampled, results)
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += batch.prefill_tokens
        self._counts["sampled_tokens"] += len(sampled)
        for request in sampled:
            self._accept_token(request, results[request])
        return results

    def _check_finite(self, sampled: list[Request], results: Results):
        """Fails the requests and raises NotFiniteError unless all logits are finite."""
        draws = [results[request] for request in sampled]
        if all(math.isfinite(draw.logprob) for draw in draws if isinstance(draw, Draw)):
            return
        error = NotFiniteError()
        for request in sampled:
            self.fail(request, error)
        raise error

    def _accept_token(self, request: Request, result: Result):
        """Appends a token to its request, and finishes the request where it ends."""
        try:
            if isinstance(result, Exception):
                raise result
            reason = request.accept(
                result.token, result.logprob, result.top_logprobs, self.weight_version
            )
        except Exception as error:
            self.fail(request, error)
            return
        if reason:
            self._finish(request, reason)

    def _call_back(self, request: Request, result: Result):
        """Tells of a token, once all tokens of the step have been accepted.

        A callback may abort any request. One that has been aborted, or has failed, hears no more.
        """
        if request.finished and request.completion.finish_reason in ("abort", "error"):
            return
        try:
            request.on_token(result.token, result.logprob)
        except Exception as error:
            self.fail(request, error)

    def _abandon(self):
        """Ends the running requests after a failure or an interrupt.

        All requests of the step are among them, but those that the step itself has ended.
        """
        self._ahead = None
        for request in list(self.scheduler.running):
            self.abort(request)
            self.scheduler.finish(request)  # of one that had ended when an interrupt came
        self.reset_prefix_cache()
        with suppress(Exception):  # the error that is about to be raised says more
            self.runner.clear()

    # The model.

    def score(self, list_of_ids: Iterable[Iterable[int]]) -> list[list[float]]:
        """Returns log p(ids[i + 1] | ids[: i + 1]) at temperature 1: n - 1 numbers for n ids.

        Normalised over the ids that the sampler can draw; minus infinity for others. Each
        sequence is computed in one forward pass, without pages. Raises UserError as `submit` does.
        """
        list_of_ids = [self.limits.check_ids(ids) for ids in list_of_ids]
        for ids in list_of_ids:
            self.limits.check_length(len(ids))
        return [score(self.model, ids, self.num_drawable) for ids in list_of_ids]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]] | None = None) -> int:
        """Copies all (Hugging Face name, tensor) pairs into the model; returns the new version.

        None says that the model has been changed already. The cache is emptied: requests in flight
        and sessions go on with the new weights, on KV computed anew. Each sampled token records
        the version that drew it. On a GPU the copies come after a step that is under way, on the
        same stream. Raises UserError if the tensors are not the model's.
        """
        try:
            if tensors is not None:
                copy_weights(self.model, tensors)
        finally:  # a copy that failed half-way has changed the weights too
            self.weight_version += 1
            self.reset_prefix_cache()
        return self.weight_version

    def reset_prefix_cache(self) -> None:
        """Forgets all KV. Requests in flight and sessions compute theirs anew."""
        self._drop_ahead()
        self.scheduler.reset()

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return self._counts | {"preemptions": self.scheduler.preemptions}
