"""The inference engine: ids in, sampled ids and log-probabilities out.

`Engine.generate` samples a batch. `submit` and `step` are the loop beneath it, for streaming.
`session` keeps a conversation's KV across tool calls, `score` gives log-probabilities, and
`update_weights` takes new weights in place. Not thread-safe: one thread owns an engine.
"""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nanorchestra.engine.cache import PageCache, PageTable
from nanorchestra.engine.gpu import GpuRunner, free_memory
from nanorchestra.engine.request import Completion, Limits, OnToken, Request, SamplingParams
from nanorchestra.engine.runner import Runner
from nanorchestra.engine.sampler import Draw
from nanorchestra.engine.scheduler import Scheduler
from nanorchestra.engine.session import Session
from nanorchestra.engine.steps import Steps
from nanorchestra.errors import NotFiniteError, require
from nanorchestra.model.ops import by_kernel
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.model.weights import copy_weights

DEFAULT_POOL = 1 << 30  # bytes


class Engine:
    """Continuous batching over a paged KV cache.

    num_pages: pages of the KV pool (default: 1 GiB worth on a CPU, on a GPU memory_share of the
    memory that is free then). page_size: tokens a page (default: 16 on a CPU, 64 on a GPU).
    max_batch_tokens: tokens that one step computes at most. max_running: requests that decode at
    the same time. max_context: longest sequence, prompt and sampled ids together (default: the
    model's). kv_dtype: of the KV (default: the model's); float8_e4m3fn halves what attention reads,
    on a GPU from sm_89 on. Raises UserError for a number below 1 or another dtype.

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
        memory_share: float = 0.9,
        kv_dtype: torch.dtype | None = None,
    ):
        config, weight = model.config, model.embed_tokens.weight
        on_gpu, kv_dtype = by_kernel(weight), kv_dtype or weight.dtype
        if page_size is None:
            page_size = 64 if on_gpu else 16
        if num_pages is None:
            numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            room = memory_share * free_memory(weight.device) if on_gpu else DEFAULT_POOL
            num_pages = max(1, int(room / (page_size * numbers * kv_dtype.itemsize)))
        longest = config.max_position_embeddings
        self.max_context = longest if max_context is None else min(max_context, longest)
        settings = num_pages, page_size, max_batch_tokens, max_running, self.max_context
        names = "pages, page size, batch tokens, running requests, context"
        require(min(settings) >= 1, f"engine: {names} are {settings}, they should be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.vocab_size, self.eos_ids = config.vocab_size, frozenset(config.eos_token_ids)
        if tokenizer is not None:
            self.vocab_size = min(self.vocab_size, tokenizer.vocab_size)
            self.eos_ids = frozenset(tokenizer.eos_ids)
        self.weight_version = 0
        kind = GpuRunner if on_gpu else Runner
        self.runner = kind(model, num_pages, page_size, self.vocab_size, kv_dtype)
        self.cache = PageCache(num_pages, page_size)
        self.scheduler = Scheduler(self.cache, max_batch_tokens, max_running, self.runner.mixed)
        self.limits = Limits(config.vocab_size, self.max_context, num_pages * page_size)
        self._ids = itertools.count()
        self._asleep = False
        self._counts = {"steps": 0, "prefill_tokens": 0, "sampled_tokens": 0}
        self._steps = Steps(self.scheduler, self.runner)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Samples each prompt to its end. Returns the completions in the same order.

        Equal prompts share their prefill; give them different seeds. Raises UserError if a prompt
        cannot be served, and then serves none; NotFiniteError if the model computes NaN.
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
        self, ids: Sequence[int], params: SamplingParams, on_token: OnToken | None = None
    ) -> Request:
        """Queues a request, which `step` serves. Calls on_token(token id, logprob) for each token.

        Raises UserError if it can never be served: an id outside the vocabulary, or a prompt
        longer than the context or the pool. A callback that raises ends its own request.
        """
        request = self.make_request(ids, params, on_token)
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        """Computes one step, if there is work. Returns the requests that finished in it.

        An exception while a request is admitted, drawn, guided, decoded or told of its token ends
        that request alone: it finishes with reason "error", and `Request.error` is the exception.
        So does a request whose logits are not finite, and the cache is emptied since its pages hold
        NaN: the others compute their KV anew. If the computation of the step itself fails, all
        running requests are aborted, the cache is emptied, and the error is raised.
        """
        require(not self._asleep, "engine: it sleeps, its KV memory is lent; call wake() first")
        plan = self._steps.plan()
        failed = list(plan.failed)
        for request, error in plan.failed.items():
            self.fail(request, error)
        if not (plan.decodes or plan.prefills):
            return failed
        try:
            with torch.inference_mode():
                draws = self._steps.compute(plan)
        except BaseException:
            for request in list(self.scheduler.running):
                self.abort(request)
            self._forget()
            self.runner.wake()  # pages may hold NaN
            raise
        self.scheduler.commit(plan)
        self._counts["steps"] += 1
        self._counts["prefill_tokens"] += sum(count for _, _, count in plan.prefills)
        self._counts["sampled_tokens"] += len(draws)
        drawn = list(zip(plan.sampling, draws, strict=True))
        accepted = self._accept(drawn)
        self._call_back(accepted)
        ended = [request for request, _ in drawn if request.finished]
        return failed + [each for each in ended if each.completion.finish_reason != "abort"]

    def _accept(self, drawn) -> list[tuple[Request, Draw]]:
        """Appends the tokens. Returns the requests that have one, with their draws."""
        accepted, finite = [], True
        for request, draw in drawn:
            if isinstance(draw, Exception):
                self.fail(request, draw)
            elif not math.isfinite(draw.logprob):
                self.fail(request, NotFiniteError())
                finite = False
        if not finite:
            self._forget()
            self.runner.wake()
        for request, draw in drawn:
            if request.finished:
                continue
            try:
                reason = request.accept(draw.token, draw.logprob, draw.top, self.weight_version)
            except Exception as error:
                self.fail(request, error)
                continue
            if reason:
                self._finish(request, reason)
            accepted.append((request, draw))
        return accepted

    def _call_back(self, accepted):
        """Tells of the tokens, all of which have been accepted: a callback may abort any request.

        A request that has been aborted, or has failed, hears no more.
        """
        for request, draw in accepted:
            ended = request.finished and request.completion.finish_reason in ("abort", "error")
            if request.on_token is None or ended:
                continue
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

        A request that finished in the present step counts as failed too.
        """
        if not request.finished:
            self.scheduler.finish(request)
        request.finish("error", self.tokenizer, error)

    def _finish(self, request, reason):
        self.scheduler.finish(request)
        request.finish(reason, self.tokenizer)

    def session(self, ids: Sequence[int] = ()) -> Session:
        """Opens a growing sequence of ids whose KV stays in the cache between its turns."""
        return Session(self, ids)

    def make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        on_token: OnToken | None = None,
        table: PageTable | None = None,
    ) -> Request:
        """Checks what a caller gives and makes the request. Raises UserError. The one door.

        Any thread may call this.
        """
        ids = self.limits.check_ids(ids)
        self.limits.check_length(ids, sampled=1)
        return Request(
            id=next(self._ids),
            ids=ids,
            params=params,
            # The last token needs no page.
            limit=min(len(ids) + params.max_tokens, self.max_context, self.limits.pool + 1),
            stop_ids=frozenset(params.stop_token_ids).union(
                () if params.ignore_eos else self.eos_ids
            ),
            on_token=on_token,
            table=table or PageTable(),
        )

    def score(self, list_of_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns log p(ids[i + 1] | ids[: i + 1]) at temperature 1: n - 1 numbers for n ids.

        Normalised over the ids that the sampler can draw; minus infinity for others. Each
        sequence is computed in one forward pass, without pages. Raises UserError as `submit` does.
        """
        list_of_ids = [self.limits.check_ids(ids) for ids in list_of_ids]
        for ids in list_of_ids:
            self.limits.check_length(ids)
        return [self.runner.score(ids) for ids in list_of_ids]

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
            self._forget()
        return self.weight_version

    def _forget(self):
        """Empties the cache: all KV will be computed anew."""
        self._steps.discard()
        self.scheduler.reset(self.weight_version)

    def sleep(self) -> None:
        """Gives the memory of the KV pool back, to a trainer say, until `wake`.

        Requests and sessions stay and compute their KV anew then. Meanwhile requests are taken,
        and `score` and `update_weights` work, but `step` raises UserError.
        """
        self._asleep = True
        self._forget()
        self.runner.sleep()

    def wake(self) -> None:
        """Takes the KV pool's memory again. If there is too little, torch's error is raised."""
        if self._asleep:
            self.runner.wake()
            self._asleep = False

    @property
    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return self._counts | {"preemptions": self.scheduler.preemptions}
