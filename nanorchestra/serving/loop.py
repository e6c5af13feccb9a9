"""The loop of a server: an engine in a thread of its own, and attempts that clients follow.

Only the thread changes the engine. The event loop hands requests over, is told of what has come,
and reads it from the requests. Requests and attempts have a time limit, and end when the client
that follows them leaves.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field
from starlette.exceptions import HTTPException

from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Attempt, Rollout
from nanorchestra.engine.engine import Engine
from nanorchestra.engine.sequence import Completion, OnToken, Request, SamplingParams
from nanorchestra.errors import NotFiniteError, UserError, require
from nanorchestra.records import Preference, Price, Task, Trajectory
from nanorchestra.schemas import Json

# What keeps an attempt that has ended.
Record = Callable[[Task, Trajectory], None]
# What a client may say of a preference: words, and names of what it bans.
Words = Annotated[str, Field(max_length=2_000)]
Names = Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=64)]

CHUNKS = 256  # a second, of all streams together: beyond that a chunk holds several tokens,
PACE_S = 0.25  # those of this time at most
REQUESTS = 512  # choices and attempts that may be open at a time
REQUEST_S = 600.0  # that an answer may take
CLOSE_S = 30.0  # that the last step may take
KEEP_S = 5.0  # without news of an attempt, after which that is told
REPORTED = "status", "cost_usd", "latency_s", "calls"  # of an attempt's trajectory
ENDING = 503, "the server is shutting down"


class Questions(Protocol):
    """What a server is asked, as worlds/terminal.py has it."""

    names: str  # of the tools
    examples: list[str]
    alone: bool  # whether the model knows only these questions, so that it cannot chat

    def open(self, question: str, preference: Preference, seed: int) -> Environment:
        """Returns the environment of an attempt. UserError."""

    def facts(self) -> Json:
        """Returns what the page says of the questions and the tools."""


class Reader(asyncio.Event):
    """Wakes what reads the requests of one answer: at `due`, or when one of them has ended."""

    due = 0.0


class Service:
    """Runs an engine. `live` has the reader of each request that has not finished.

    Without an engine attempts ask an endpoint. `attempts` are those that have not ended. `record`
    is called with each attempt that has ended, one that was stopped too.
    """

    def __init__(self, engine: Engine | None, record: Record | None = None):
        self.engine, self.due = engine, 0.0  # `due`: when a reader wants to know of a step
        self._record = record
        self.aborted = 500, "the engine failed"  # the status and the reason of an abort
        self.open = 0  # choices and attempts that are being answered
        self.live: dict[Request, Reader] = {}
        self.attempts: set[asyncio.Task] = set()
        self.jobs = queue.SimpleQueue()  # (call, request) for the thread; None ends it
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def check_room(self, count: int) -> None:
        """Raises UserError for more choices than may ever be open, HTTPException if now too many.

        It costs nothing: call it before anything is computed for them.
        """
        require(count <= REQUESTS, f"n: {count} choices of all prompts, at most {REQUESTS}")
        if self.aborted == ENDING:
            raise HTTPException(*ENDING)
        if self.open + count > REQUESTS:
            raise HTTPException(429, f"{self.open} requests are open; try again later")

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Counts choices, or an attempt, as open for as long as they are answered.

        Raises as `check_room` does.
        """
        self.check_room(count)
        self.open += count
        try:
            yield
        finally:
            self.open -= count

    async def sample(self, choices: list[tuple]) -> AsyncIterator[list[tuple]]:
        """Samples (ids, SamplingParams) of each choice of an answer; closed, it ends what runs.

        Yields all (request, why it ended or None) when there is more to read, until all have ended.
        HTTPException if the server ends, or a request failed. TimeoutError. UserError if a prompt
        or a grammar cannot be served.
        """
        self.loop = asyncio.get_running_loop()
        deadline = time.monotonic() + REQUEST_S
        requests = await asyncio.to_thread(self._make, choices)
        if self.aborted == ENDING:
            raise HTTPException(*ENDING)
        reader, reasons = Reader(), [None]
        self.live |= dict.fromkeys(requests, reader)
        self._do(self.engine.scheduler.add, requests)
        try:
            while not all(reasons):
                await asyncio.wait_for(reader.wait(), deadline - time.monotonic())
                reader.clear()
                reasons = [each.completion and each.completion.finish_reason for each in requests]
                for request in requests:
                    self._check(request)
                yield list(zip(requests, reasons, strict=True))
        finally:
            self._do(self.engine.abort, requests)

    def record(self, task: Task, trajectory: Trajectory) -> None:
        """Records an attempt, if there is a place for it. A failure of that ends no answer."""
        try:
            if self._record is not None:
                self._record(task, trajectory)
        except UserError as error:
            logging.error("an attempt is not recorded: %s", error)

    def end(self) -> None:
        """Ends what still runs."""
        self.aborted = ENDING
        for attempt in [*self.attempts]:
            attempt.cancel()
        if self.engine is not None:
            self._do(self.engine.abort, self.live)

    def close(self) -> None:
        """Ends the thread, after the step that it computes: torch must not outlive the process."""
        self.jobs.put(None)
        self.thread.join(CLOSE_S)

    def _make(self, choices) -> list[Request]:
        return [self.engine.make_request(*choice) for choice in choices]

    def _check(self, request):
        """Raises what ended a request, if it did not end by its text."""
        error = request.error
        if isinstance(error, NotFiniteError):
            raise HTTPException(500, str(error))
        if isinstance(error, UserError):
            raise UserError(str(error))
        if error is not None:
            logging.error("a request failed", exc_info=error)
            raise HTTPException(500, "the request failed by an error of the server")
        if request.finished and request.completion.finish_reason == "abort":
            raise HTTPException(*self.aborted)

    def _do(self, call, requests):
        """Has the thread call it with each of the requests that have not ended."""
        for request in requests:
            if not request.finished:
                self.jobs.put((call, request))

    def _work(self):
        """The thread: what was asked for, then a step if there is work."""
        while True:
            news = True
            if self.jobs.empty() and self.engine is not None and self.engine.has_work:
                news = self._step()
            elif (job := self.jobs.get()) is None:
                return
            else:
                call, request = job
                try:
                    call(request)
                except Exception as error:
                    self.engine.fail(request, error)
            if self.jobs.empty() and (news or time.monotonic() >= self.due):
                self.loop.call_soon_threadsafe(self._look)

    def _step(self) -> bool:
        """Computes a step. Returns whether requests have ended; all do if it fails."""
        queues = self.engine.scheduler
        try:
            return bool(self.engine.step())
        except Exception:
            logging.exception("the engine failed: its requests end")
            for request in queues.waiting + queues.running:
                self.engine.abort(request)
            return True

    def _look(self):
        """Wakes the readers of requests that have ended, or whose time has come."""
        now, pace = time.monotonic(), min(PACE_S, len(self.live) / CHUNKS)
        for request, reader in list(self.live.items()):
            if ended := request.finished:
                del self.live[request]
            if ended or (now >= reader.due and request.logprobs):
                reader.due = (now // pace + 1) * pace  # all at one time: one wake of the loop
                reader.set()
        self.due = min((reader.due for reader in self.live.values()), default=0.0)


class ServedAttempt(Attempt):
    """An attempt that one client follows, in a task of its own.

    `sampling` are the fields of SamplingParams that the client decides; an endpoint is given the
    temperature of them, and the seed if the client states one.
    """

    def __init__(
        self,
        service: Service,
        rollout: Rollout,
        env: Environment,
        seed: int,
        sampling: Json,
        states_seed: bool = False,
    ):
        self.service = service
        self._news: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._gaps: dict[str, str] = {}  # what separates the texts of two turns, by kind
        self._told: set[str] = set()  # kinds of text that came in any turn
        self._content = ""  # of the last turn
        if service.engine is None:
            served = rollout.sampling(sampling["temperature"], states_seed)
        else:
            served = copy(rollout)
            served.params = lambda seed, tokens: SamplingParams(tokens, seed=seed, **sampling)
            served.open = lambda _, prompt: ServedConversation(service, rollout.price, prompt.ids)
        super().__init__(served, 0, env, seed, self._tell)

    async def follow(self) -> AsyncIterator[tuple[str, Any]]:
        """Plays the attempt; closed, it ends it.

        Yields ("reasoning", text), ("content", text), ("call", its JSON) and ("result", ToolResult)
        as they come, and ("silence", None) after KEEP_S without any. HTTPException if there is no
        room, the infrastructure failed, or the server ends. TimeoutError.
        """
        with self.service.admitted(1):
            task = asyncio.ensure_future(self._play_in_time())
            self.service.attempts.add(task)
            task.add_done_callback(self.service.attempts.discard)
            task.add_done_callback(lambda task: self._news.put_nowait(("end", None)))
            try:
                while (news := await self._next())[0] != "end":
                    yield news
                if task.cancelled():
                    raise HTTPException(*self.service.aborted)
                if task.result().status == "infrastructure":
                    raise HTTPException(502, self.trajectory.failure)
            finally:
                task.cancel()

    def rest(self) -> str:
        """Returns what of the answer has not come as the content of a turn."""
        answer = self.trajectory.answer
        if self._content and answer.startswith(self._content):
            return answer[len(self._content) :]
        return "\n\n" + answer if answer and "content" in self._told else answer

    async def _next(self) -> tuple[str, Any]:
        try:
            return await asyncio.wait_for(self._news.get(), KEEP_S)
        except TimeoutError:
            return "silence", None

    async def _play_in_time(self) -> Trajectory:
        """Runs to the end, or for REQUEST_S at most. It is recorded however it ends."""
        try:
            async with asyncio.timeout(REQUEST_S):
                return await self.run()
        except (asyncio.CancelledError, TimeoutError):  # the client has left, or the time is over
            self.trajectory.status = "stopped"
            raise
        finally:
            self.service.record(self.env.task, self.trajectory)

    def _tell(self, kind, payload):
        """Tells the client of an event of the loop."""
        if kind in ("text", "turn"):
            for part, text in payload:
                if part == "tool_call":
                    self._news.put_nowait(("call", text))
                    continue
                if part == "content":
                    self._content += text
                self._news.put_nowait((part, self._gaps.pop(part, "") + text))
                self._told.add(part)
        if kind == "turn":
            self._gaps = dict.fromkeys(self._told, "\n\n")
        elif kind == "results":
            self._content = ""
            for result in payload.results:
                self._news.put_nowait(("result", result))


@dataclass
class ServedConversation:
    """The session of an attempt: each turn is a request of its own on the KV of the last."""

    service: Service
    price: Price
    ids: list[int]

    def prices(self) -> tuple[float, float]:
        """Returns no price of reading, since the KV cache holds the prompt, and that of an id."""
        return 0.0, self.price.cost(0, 1)

    def append(self, ids: list[int], role: str, contents: list[str]) -> None:
        """Adds the ids of observations."""
        self.ids = self.ids + ids

    async def sample(self, params: SamplingParams, on_token: OnToken) -> Completion:
        """Returns the next turn's Completion. HTTPException if the server ends it."""
        count = 0
        async for ((request, _),) in self.service.sample([(self.ids, params)]):
            new = request.logprobs[count:]
            for place, logprob in enumerate(new, request.prompt_tokens + count):
                on_token(request.ids[place], logprob)
            count += len(new)
        self.ids = request.ids
        return request.completion

    def close(self) -> None:
        """Does nothing: no request is open between turns."""
