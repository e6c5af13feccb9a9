"""The inference engine: ids in, sampled ids and log-probabilities out.

`Engine.generate` samples a batch. `submit` and `step` are the loop beneath it, for streaming.
`session` keeps a conversation's KV across tool calls, `score` gives log-probabilities, and
`update_weights` takes new weights in place. Not thread-safe: one thread owns an engine.

A runner, `CpuRunner` or on a GPU `ModelRunner`, owns the KV pages (`kv_cache`) and computes a batch
in three calls:

    launch(batch, after)      starts a step and returns what the other calls need. after: the
                              launched step before, if its draws are not read yet; they are the
                              newest ids of the batch's requests
    draw(launched, requests)  finishes the draws of a step for these requests, after the tokens of
                              the step before are accepted and before the next launch
    read(launched, requests)  returns the draws of these requests once they are there

`wait` returns when everything that was launched has been computed. `overlaps` says whether the
engine may launch a step before it reads the one before, `mixed_prefill` how many tokens of prefill
a step that also decodes has at most, if they are bounded.
"""

import itertools
import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.cpu_runner import CpuRunner
from nanorchestra.engine.model_runner import ModelRunner
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
from nanorchestra.model.checkpoint import copy_weights
from nanorchestra.model.ops import by_kernel
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer

DEFAULT_POOL = 1 << 30  # bytes of a CPU's KV pool


@dataclass
class Step:
    """A batch, and what the runner has launched for it."""

    batch: Batch
    launched: Any


class Engine:
    """Continuous batching over a paged KV cache.

    num_pages: pages of the KV pool (default: 1 GiB worth on a CPU; on a GPU a share of what is free
    once steps have run). page_size: tokens a page (default: 16 on a CPU,
    64 on a GPU). max_batch_tokens: tokens that one step computes at most. max_running: requests
    that decode at the same time. max_context: longest sequence, prompt and sampled ids together
    (default: the model's). Raises UserError for a number below 1.

    The model may be shared with a trainer. Call `update_weights()` after changing it in place.
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
        config, weight = model.config, model.embed_tokens.weight
        on_gpu = by_kernel(weight)
        if page_size is None:
            page_size = 64 if on_gpu else 16
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
        if num_pages is None and not on_gpu:
            kv_heads = 2 * config.num_hidden_layers * config.num_key_value_heads
            token_bytes = kv_heads * config.head_dim * weight.dtype.itemsize
            num_pages = max(1, DEFAULT_POOL // (page_size * token_bytes))

        self.model, self.tokenizer = model, tokenizer
        self.vocab_size, self.eos_ids = config.vocab_size, frozenset(config.eos_token_ids)
        if tokenizer is not None:
            self.vocab_size = min(self.vocab_size, tokenizer.vocab_size)
            self.eos_ids = frozenset(tokenizer.eos_ids)
        self.weight_version = 0
        self.runner: CpuRunner | ModelRunner
        if on_gpu:
            self.runner = ModelRunner(
                model,
                num_pages,
                page_size,
                self.vocab_size,
                max_batch_tokens,
                max_running,
                self.max_context,
            )
        else:
            self.runner = CpuRunner(model, num_pages, page_size, self.vocab_size)
        num_pages = self.runner.num_pages
        self.blocks = BlockManager(num_pages, page_size)
        self.scheduler = Scheduler(
            self.blocks, max_batch_tokens, max_running, self.runner.mixed_prefill
        )
        self.limits = Limits(config.vocab_size, self.max_context, num_pages * page_size)
        self._request_ids = itertools.count()
        # The step after the last one: launched before that one's tokens were read, drawn once they
        # were accepted, read by the next call of `step`.
        self._ahead: Step | None = None
        self._counts = {"steps": 0, "prefill_tokens": 0, "sampled_tokens": 0}

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
        for request in requests:
            self.scheduler.add(request)
        try:
            while not all(request.finished for request in requests):
                self.step()
        finally:
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

    def step(self) -> list[Request]:
        """Computes one step, if there is work: launch, launch the next, read, accept, call back.

        Returns the requests that ended in it by a stop, a limit or an error. A caller knows what it
        has aborted.

        On a GPU the next step is launched before the tokens of this one are read, if the next step
        only decodes (`Scheduler.schedule_ahead`). The GPU then computes while the host reads, and
        the newest ids go from one step to the next on the device. With `runner.overlaps` False, as
        on a CPU, steps follow one another; the tokens are the same.

        An exception while a request is admitted, guided, decoded or told of its token ends that
        request alone: it finishes with reason "error", and `Request.error` is the exception. If the
        step itself fails or is interrupted, all its requests are aborted, the cache is emptied, and
        the error is raised. So it is by NotFiniteError if logits are not finite, which is then the
        error of all requests that the step samples. A callback must not call `step`.
        """
        failed, step = [], None
        try:
            with torch.inference_mode():
                step = self._take_ahead() or self._start_step(failed)
                if step is None:
                    return failed
                self._launch_ahead(step)
                sampled = step.batch.sampled
                results = self.runner.read(step.launched, sampled)
                self._check_finite(sampled, results)
                self._commit(step.batch)
                accepted = self._accept_all(sampled, results)
                # The guides have their tokens, so the next step can be drawn. Callbacks come last:
                # the GPU works meanwhile.
                self._draw_ahead()
        except BaseException:
            self._abandon(step)
            raise
        for request, draw in accepted:
            self._call_back(request, draw)
        ended = [request for request in sampled if request.finished]
        return failed + [each for each in ended if each.completion.finish_reason != "abort"]

    def _take_ahead(self) -> Step | None:
        """Returns the step that was launched ahead, without the requests that have ended since.

        Such a request still has a row in it, which is ignored. What the row wrote lies in pages
        that are free again. Only a later step can hand them out, and it comes later on the device.
        """
        step = self._ahead
        if step is None:
            return None
        going_on = [request for request in step.batch.decodes if not request.finished]
        if not going_on:
            self._drop_ahead()
            return None
        self._ahead = None
        step.batch.decodes = going_on
        return step

    def _start_step(self, failed: list[Request]) -> Step | None:
        """Schedules, launches and draws a step; None if there is nothing to compute.

        Adds the requests that cannot be admitted to `failed`.
        """
        batch = self.scheduler.schedule()
        for request, error in batch.failed.items():
            self.fail(request, error)
            failed.append(request)
        if not (batch.decodes or batch.prefills):
            return None
        step = Step(batch, self.runner.launch(batch))
        self.runner.draw(step.launched, batch.sampled)
        return step

    def _launch_ahead(self, step: Step):
        """Launches the step after this one, if it can be scheduled without this one's tokens."""
        if not self.runner.overlaps:
            return
        batch = self.scheduler.schedule_ahead(step.batch)
        if batch is not None:
            self._ahead = Step(batch, self.runner.launch(batch, after=step.launched))

    def _draw_ahead(self):
        """Finishes the draws of the step launched ahead, but for requests that have ended."""
        if self._ahead is not None:
            going_on = [r for r in self._ahead.batch.decodes if not r.finished]
            self.runner.draw(self._ahead.launched, going_on)

    def _drop_ahead(self):
        """Forgets the step launched ahead, once the device no longer reads its host memory."""
        if self._ahead is not None:
            self._ahead = None
            self.runner.wait()

    def _abandon(self, step: Step | None):
        """Ends the running requests, and those of the step, after a failure or an interrupt."""
        self._ahead = None
        for request in [*self.scheduler.running, *(step.batch.sampled if step else ())]:
            self.abort(request)
        self.reset_prefix_cache()
        with suppress(Exception):  # the error that is about to be raised says more
            self.runner.wait()
            # The C multiplies values behind a sequence's last key by 0, and 0 * NaN is NaN.
            self.runner.kv_cache.zero_()

    def _check_finite(self, sampled: list[Request], results: list[Result]):
        """Fails the requests and raises NotFiniteError unless all logits are finite."""
        draws = [result for result in results if isinstance(result, Draw)]
        if all(math.isfinite(draw.logprob) for draw in draws):
            return
        error = NotFiniteError()
        for request in sampled:
            self.fail(request, error)
        raise error

    def _commit(self, batch: Batch):
        """Records that a step has been computed."""
        self.scheduler.commit(batch)
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += batch.prefill_tokens
        self._counts["sampled_tokens"] += len(batch.sampled)

    def _accept_all(
        self, sampled: list[Request], results: list[Result]
    ) -> list[tuple[Request, Draw]]:
        """Gives the requests their tokens; returns those that have one, with their draws."""
        accepted = []
        for request, result in zip(sampled, results, strict=True):
            if self._accept(request, result):
                accepted.append((request, result))
        return accepted

    def _accept(self, request: Request, result: Result) -> bool:
        """Appends a token to its request, and finishes the request where it ends. False: failed."""
        if isinstance(result, Exception):
            self.fail(request, result)
            return False
        try:
            reason = request.accept(
                result.token, result.logprob, result.top_logprobs, self.weight_version
            )
        except Exception as error:
            self.fail(request, error)
            return False
        if reason:
            self._finish(request, reason)
        return True

    def _call_back(self, request, draw: Draw):
        """Tells of a token, once all tokens of the step have been accepted.

        A callback may abort any request. One that has been aborted, or has failed, hears no more.
        """
        ended = request.finished and request.completion.finish_reason in ("abort", "error")
        if request.on_token is None or ended:
            return
        try:
            request.on_token(draw.token, draw.logprob)
        except Exception as error:
            self.fail(request, error)

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
        if not request.finished:
            self.scheduler.finish(request)
        request.finish("error", self.tokenizer, error)

    def _finish(self, request, reason):
        self.scheduler.finish(request)
        request.finish(reason, self.tokenizer)

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

    def score(self, list_of_ids: Iterable[Iterable[int]]) -> list[list[float]]:
        """Returns log p(ids[i + 1] | ids[: i + 1]) at temperature 1: n - 1 numbers for n ids.

        Normalised over the ids that the sampler can draw; minus infinity for others. Each
        sequence is computed in one forward pass, without pages. Raises UserError as `submit` does.
        """
        list_of_ids = [self.limits.check_ids(ids) for ids in list_of_ids]
        for ids in list_of_ids:
            self.limits.check_length(len(ids))
        return [score(self.model, ids, self.vocab_size) for ids in list_of_ids]

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]] | None = None) -> int:
        """Copies all (Hugging Face name, tensor) pairs into the model; returns the new version.

        None says that the model has been changed already. The cache is emptied: requests in flight
        and sessions go on with the new weights, on KV computed anew. Each sampled token records
        the version that drew it. Raises UserError if the tensors are not the model's.
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
        self.scheduler.reset(self.weight_version)

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return self._counts | {"preemptions": self.scheduler.preemptions}
