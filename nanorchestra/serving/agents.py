"""Agents that are not ours play attempts: a Python function that asks the policy over HTTP.

The run listens on this machine. Each attempt has a key of its own: its requests to
/v1/chat/completions are the turns of one trajectory. A request whose messages begin with all that
was said before goes on with the session's ids; nothing is tokenised twice, and the KV stays. One
that says something else begins a new prompt of the same trajectory, another sample for the trainer.

    POST /v1/chat/completions           the next turn; the run decides temperature and seed

docs/training.md has a whole agent, and what becomes of one that fails, hangs or floods the run.
"""

import asyncio
import inspect
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NotRequired

import uvicorn
from fastapi.responses import Response
from pydantic import Field
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from nanorchestra.agent.context import Prompt
from nanorchestra.agent.environment import Environment
from nanorchestra.agent.loop import Attempt, OnEvent, Pump, Rollout
from nanorchestra.agent.numbering import REQUEST_COUNTS
from nanorchestra.agent.threads import in_daemon
from nanorchestra.engine.sequence import Completion
from nanorchestra.files import import_function, own_fault
from nanorchestra.model import chat
from nanorchestra.records import ParsedTurn, ToolCall, ToolResult, Turn
from nanorchestra.schemas import Json
from nanorchestra.serving.api import (
    CHAT,
    ChatRequest,
    Choice,
    Credentials,
    answer,
    refuse,
    require_values,
    usage,
)
from nanorchestra.serving.http import Application, address, listen
from nanorchestra.validation import validated

MODEL = "policy"  # its name for agents
MOST_BYTES = 32 << 20  # of a body
ITERATIONS = 16  # of the event loop between two steps of the engine

Sampled = tuple[Completion, ParsedTurn]  # a turn


# --- what a user writes


class TaskCall(TypedDict):
    """A call of one of the task's tools."""

    name: str
    arguments: NotRequired[Json]


class Calls(TypedDict):
    """What an agent calls at once."""

    calls: Annotated[list[TaskCall], Field(min_length=1)]


class AgentFailure(Exception):  # noqa: N818
    """The agent itself failed, not the policy. The message is one line."""


@dataclass(frozen=True)
class AttemptHandle:
    """What an agent's function is given: where it asks the policy, the task, and its tools.

    `task` has id, question, messages, tools (OpenAI's function objects), seed and split. `call`
    runs calls of the task's tools side by side and returns their results, in order. A call has
    "name" and "arguments", a result "content", "error", "cost_usd", "latency_s".
    """

    base_url: str
    api_key: str
    task: Json
    call: Callable[[list[Json]], list[Json]]
    model: str = MODEL


@dataclass(frozen=True)
class AgentFunction:
    """A function, or coroutine function, of an AttemptHandle, in a thread of its own.

    It returns a reward from 0 to 1, an answer, or None.
    """

    name: str
    function: Callable[[AttemptHandle], Any]
    file: str = ""

    async def run(self, attempt: AttemptHandle) -> Any:
        """Returns what the function returns. AgentFailure for what it raises."""

        def call():
            try:
                said = self.function(attempt)
                return asyncio.run(said) if inspect.isawaitable(said) else said
            except BaseException as error:  # of the agent, in a thread that Ctrl-C does not reach
                raise AgentFailure(own_fault(error, self.name, self.file)[:500]) from None

        return await asyncio.wrap_future(in_daemon(call))


def load_agent(word: str) -> AgentFunction:
    """Returns the agent that FILE.py:FUNCTION names. UserError."""
    function, (file, _, name) = import_function(word, "task.agent"), word.rpartition(":")
    path = Path(file).resolve()
    return AgentFunction(f"{path.name}:{name}", function, str(path))


# --- attempts that it plays


def played_by(agent: str, rollout: Rollout, timeout_s: float) -> "AgentRollout":
    """Returns a rollout like another one, whose attempts an agent plays. UserError."""
    settings = {each.name: getattr(rollout, each.name) for each in fields(Rollout)}
    return AgentRollout(**settings, agent=load_agent(agent), timeout_s=timeout_s)


@dataclass(eq=False)
class AgentRollout(Rollout):
    """A rollout whose attempts are played by `agent`, for `timeout_s` seconds each at most."""

    agent: AgentFunction | None = None
    timeout_s: float = 600.0
    attempts: dict[str, "AgentAttempt"] = field(default_factory=dict)  # that run, by their key

    def attempt(
        self, index: int, env: Environment, seed: int, on_event: OnEvent | None
    ) -> "AgentAttempt":
        """Returns an attempt that the agent plays."""
        return AgentAttempt(self, index, env, seed, on_event)

    def pump(self) -> Pump:
        """Returns a pump that leaves requests time on their way."""
        return Pump(self.engine, self.settings.lockstep, ITERATIONS)

    async def _run(self, environments, seeds, on_event):
        async with _listening(self) as self.base_url:
            return await super()._run(environments, seeds, on_event)


class AgentAttempt(Attempt):
    """One attempt that an agent plays. Its requests are answered one after the other."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.key = secrets.token_urlsafe(24)
        self.form: Any = None  # the tools and the template's settings of the session's prompt
        self.known: list[Json] = []  # the messages that the session's ids say
        self.goes_on = False  # whether the session can be continued
        self.cut = ""  # the status, once a limit or the infrastructure has ended the attempt
        self.reward: Real | None = None  # that the agent has stated
        self.settled: Turn | None = None  # the last turn whose own calls were counted
        self.asking, self.calling = asyncio.Lock(), asyncio.Lock()

    async def _play(self) -> str:
        self.requests = REQUEST_COUNTS.get()  # numbers the requests of this attempt to experts
        loop = asyncio.get_running_loop()

        def call(calls: list[Json]) -> list[Json]:  # in the thread of the agent
            copied = json.loads(json.dumps({"calls": calls}))
            calls = validated(Calls, copied, "attempt.call")["calls"]
            if loop.is_closed():
                raise AgentFailure("calls: the run is over")
            return asyncio.run_coroutine_threadsafe(self.call(calls), loop).result()

        handle = AttemptHandle(self.rollout.base_url, self.key, self.about(), call)
        self.rollout.attempts[self.key] = self
        try:
            async with asyncio.timeout(self.rollout.timeout_s) as self.time_limit:
                said = await self.rollout.agent.run(handle)
            if said is not None:
                self.take(said)
        except TimeoutError:
            self.cut = self.cut or "time_limit"
        except AgentFailure as failure:
            if not self.cut:
                self._fail(str(failure))
        finally:
            del self.rollout.attempts[self.key]
        async with self.asking, self.calling:  # what is still being answered
            self._settle()
        if self.cut:
            return self.cut
        if not any(self.trajectory.sampled):
            self._fail("the agent asked the policy nothing")
        elif self.reward is not None and not self.trajectory.answer:
            self.trajectory.answer = f"reward {self.reward}"  # its agent ended it well
        return self.cut or "answered"

    async def _score(self) -> None:
        if self.reward is not None:
            self.trajectory.outcome = float(self.reward)
        else:
            await super()._score()

    def about(self) -> Json:
        """Returns what the agent may know of the task: nothing of the answer."""
        task = self.env.task
        own = {name: task.data[name] for name in ("seed", "split") if name in task.data}
        return {
            "id": task.id,
            "question": task.question,
            "messages": list(self.env.messages),
            "tools": self.env.tools,
        } | own

    def take(self, said: Any) -> None:
        """Takes the agent's reward or answer. AgentFailure for what is neither."""
        if isinstance(said, str):
            self.trajectory.answer = said
        elif isinstance(said, Real) and not isinstance(said, bool) and 0 <= said <= 1:
            self.reward = said
        else:
            right = "a reward from 0 to 1, or an answer, which is a text"
            raise AgentFailure(f"reward: {str(said)[:80]} must be {right}")

    # --- the policy

    async def complete(self, body: ChatRequest) -> AsyncIterator[Json]:
        """Samples the next turn; returns the chunks of the answer. HTTPException if it cannot."""
        async with self.asking:
            self._check(body)
            self._settle()
            self._continue(body)
            t = self.trajectory
            asked = body.max_tokens
            room = min(self.settings.turn_tokens, self._room(), asked)
            tokens = self.user_limits.writable(room, *self.conversation.prices())
            if tokens <= 0:
                self._end("token_limit" if room <= 0 else "user_limit", "no token is left")
            self.goes_on = False
            completion, parsed = await self._untimed(self._sample(tokens))
            if completion.finish_reason == "error":
                self._end("infrastructure", completion.text)
            t.turns[-1].calls = list(parsed.calls)
            t.answer = parsed.content or t.answer
            return self._answer(body, completion)

    async def _untimed(self, sampling: Awaitable[Sampled]) -> Sampled:
        """Awaits the policy. Its seconds are not the agent's: in lockstep others hold it up."""
        clock = asyncio.get_running_loop().time
        left_s = self.time_limit.when() - clock()
        self.time_limit.reschedule(None)
        try:
            return await sampling
        finally:
            if self.key in self.rollout.attempts:  # the agent has not ended meanwhile
                self.time_limit.reschedule(clock() + left_s)

    def _check(self, body):
        """Raises for a request that is not served, or comes after the attempt's end."""
        if self.cut or self.key not in self.rollout.attempts:
            raise HTTPException(400, f"the attempt is over ({self.cut or 'the agent has ended'})")
        require_values(
            body,
            "a run samples one continuation, without a grammar",
            n=(1,),
            response_format=({"type": "text"},),
            tool_choice=("auto", "none"),
        )
        turns = self.settings.turns
        if len(self.trajectory.turns) >= turns:
            self._end("turn_limit", f"{turns} turns have been sampled: rollout.turns")

    def _end(self, status, problem):
        """Ends the attempt by a limit. HTTPException."""
        self.cut = status
        raise HTTPException(400, f"the attempt is over: {problem}")

    def _fail(self, problem):
        """Makes the attempt a failure of the infrastructure."""
        self.cut = "infrastructure"
        t, result = (
            self.trajectory,
            ToolResult(f"Error: {problem}", error=True, infrastructure=True),
        )
        end = len(t.ids)
        t.turns.append(Turn(end, end, "error", results=[result], context=self.context_start))

    def _continue(self, body):
        """Adds to the session what the messages of a body have beyond it, or begins another."""
        messages, t = body.messages, self.trajectory
        plain = [_plain(message) for message in messages]
        form = (body.tools, body.chat_template_kwargs)
        count = len(self.known)
        extends = self.goes_on and form == self.form and plain[:count] == self.known
        if extends and len(plain) > count:
            end = self.tokenizer.token_id(chat.IM_END)
            ids = [] if t.ids[-1] == end else [end]  # of a turn that a limit has cut
            ids += chat.encode_after(self.tokenizer, messages[count:])
            self._check_room(len(t.ids) - self.context_start + len(ids), len(ids))
            self.conversation.append(ids, messages[-1]["role"], [])
            self._append_given(ids)
        else:
            thinks = body.chat_template_kwargs.get("enable_thinking")
            ids = chat.encode(self.tokenizer, messages, body.tools, thinks)
            self._check_room(len(ids), len(ids))
            self._begin(Prompt(messages, ids))
        self.known, self.form = plain, form

    def _check_room(self, length, new):
        """Ends the attempt if a context has no room for a sampled id, or cannot be paid for."""
        most = self.settings.context_tokens
        if length >= most:
            self._end("token_limit", f"the messages have {length} tokens of {most}")
        if new > self.user_limits.readable():
            self._end("user_limit", "the user's dollars do not pay for reading the messages")

    def _answer(self, body, completion) -> AsyncIterator[Json]:
        """Returns the answer as one chunk, then the usage."""
        t = self.trajectory
        turn = t.turns[-1]
        choice = Choice(body, 0, self.tokenizer, t.ids[turn.context : turn.start])
        sampled = SimpleNamespace(
            prompt_tokens=0,
            ids=completion.token_ids,
            logprobs=completion.logprobs,
            top_logprobs=[[] for _ in completion.logprobs],
        )
        chunk = choice.feed(sampled, completion.finish_reason)
        # A stop or a second call that the agent does not see: its next messages say other ids.
        self.goes_on = choice.count == len(completion.token_ids)
        said = {"role": "assistant"} | chunk["delta"]
        self.known = [*self.known, _plain(said)]
        first = {"choices": [chunk]}
        if body.return_token_ids:
            first["prompt_token_ids"] = t.ids[turn.context : turn.start]
        prompt = turn.start - turn.context
        counted = usage(prompt, len(completion.token_ids), completion.cached_tokens)
        return _chunks(first, {"choices": [], "usage": counted})

    # --- the tools

    async def call(self, calls: list[Json]) -> list[Json]:
        """Runs calls of the task's tools side by side and bills them; returns their results.

        AgentFailure if it comes too early or too late, or if the infrastructure fails.
        """
        async with self.calling:
            t = self.trajectory
            if self.cut or not t.turns or self.key not in self.rollout.attempts:
                raise AgentFailure("calls: the policy comes first; or the attempt is over")
            REQUEST_COUNTS.set(self.requests)  # of this call's own task
            made = [ToolCall(call["name"], call.get("arguments", {})) for call in calls]
            results = await self.user_limits.execute(made, self.settings.calls_per_turn)
            turn = t.turns[-1]
            if not turn.results:
                turn.calls = []
            t.add_calls(turn, made, results)
            failed = [result.content for result in results if result.infrastructure]
            if failed and not self.rollout.survives_failures:
                self.cut = "infrastructure"
                raise AgentFailure(f"calls: {failed[0]}")
            self._emit("results", turn)
            shown = ("content", "error", "cost_usd", "latency_s")
            return [{name: asdict(result)[name] for name in shown} for result in results]

    def _settle(self):
        """Counts the calls of the last turn that the agent ran by itself, if it ran any."""
        turns = self.trajectory.turns
        if turns and turns[-1].calls and not turns[-1].results and turns[-1] is not self.settled:
            self.settled = turns[-1]
            for call in turns[-1].calls:
                self.trajectory.calls[call.name] = self.trajectory.calls.get(call.name, 0) + 1


async def _chunks(*chunks):
    for chunk in chunks:
        yield chunk


def _plain(message: Json) -> Json:
    """Returns what a message says: without reasoning, ids of calls and spaces around the content.

    Clients leave the first out, name the second anew, and some strip the third.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        calls.append([function["name"], arguments])
    return {
        "role": message["role"],
        "content": (message.get("content") or "").strip(),
        "calls": calls,
    }


# --- the server


class AttemptServer(uvicorn.Server):
    """Answers the agents of a rollout. The run keeps its own handlers of signals."""

    def __init__(self, rollout: AgentRollout):
        self.rollout = rollout
        self.defaults = {"max_tokens": rollout.engine.max_context}
        app = Application(refuse, "127.0.0.1", MOST_BYTES)
        app.post(CHAT)(self._turn)
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    def capture_signals(self):
        """Leaves signals as they are."""
        return nullcontext()

    async def _turn(self, body: ChatRequest, credentials: Credentials) -> Response:
        attempt = self.rollout.attempts.get(credentials.credentials if credentials else "")
        if attempt is None:
            raise HTTPException(401, "the key is that of no attempt that runs")
        body = body.with_defaults(self.defaults)
        return answer(body, await attempt.complete(body))


@asynccontextmanager
async def _listening(rollout: AgentRollout) -> AsyncIterator[str]:
    """Serves the agents of a rollout; yields the base URL."""
    listening = listen("127.0.0.1", 0)
    server = AttemptServer(rollout)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        yield f"{address(listening)}/v1"
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listening.close()
