"""The routes of the server: who may ask, what is answered, how errors look and how it ends."""

import asyncio
import base64
import hashlib
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, Request
from fastapi.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Send

from nanorchestra.agent.loop import Rollout
from nanorchestra.engine.sequence import Limits
from nanorchestra.errors import UserError, require
from nanorchestra.schemas import Json
from nanorchestra.serving.grammars import Grammars
from nanorchestra.serving.listening import (
    REFUSED,
    address,
    application,
    listen,
    problem_of,
    serve,
)
from nanorchestra.serving.orchestrate import MakeEnvironment, orchestrated
from nanorchestra.serving.protocol import (
    KEEP_ALIVE,
    Answer,
    AnyRequest,
    ChatRequest,
    Choice,
    CompletionRequest,
    Refusal,
    as_choices,
    dumps,
    merge,
    nothing_yet,
    usage,
)
from nanorchestra.serving.service import Record, Service
from nanorchestra.tools.models import SERVED

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def page_policy(page: str) -> str:
    """Returns the Content-Security-Policy of a page: its own style and script, this server alone.

    No text can become markup: the script may not assign any.
    """
    allowed = {}
    for tag in ("style", "script"):
        text = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        allowed[tag] = f"{tag}-src 'sha256-{digest}'"
    return (
        f"default-src 'none'; connect-src 'self'; img-src data:; {allowed['style']}; "
        f"{allowed['script']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )


PAGE_POLICY = page_policy(PAGE)

DRAIN_S = 20.0  # until what runs is ended, once the server is
CHAT = "/v1/chat/completions"
REPLIES = {  # of a chat and of a completion, for /openapi.json
    200: {"model": Answer, "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    "4XX": {"model": Refusal, "description": "The request is wrong; param names the field."},
    "5XX": {"model": Refusal, "description": "The model, a tool or the server failed."},
}
# The bearer token of a request, "" without one.
BEARER = HTTPBearer(auto_error=False)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]


class ChunkWriter:
    """Writes the chunks of a chat or of a completion, as one answer or as a stream."""

    def __init__(self, body: AnyRequest):
        kind = "text_completion"
        if isinstance(body, ChatRequest):
            kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = {"id": secrets.token_hex(12), "created": int(time.time())}
        self.head |= {"model": body.model, "object": kind}
        self.has_usage = body.stream_options.get("include_usage")

    async def whole(self, chunks: AsyncIterator[Json]) -> AsyncIterator[bytes]:
        """Yields one answer of all chunks."""
        head, choices = dict(self.head), {}
        async for chunk in chunks:
            for choice in chunk["choices"]:
                merge(choices, {choice["index"]: choice})
            head |= chunk
        for choice in choices.values():
            if delta := choice.pop("delta", None):
                choice["message"] = {"content": None} | delta
                for call in delta.get("tool_calls", ()):
                    del call["index"]
        yield dumps(head | {"choices": [choices[index] for index in sorted(choices)]})

    async def stream(self, chunks: AsyncIterator[Json]) -> AsyncIterator[bytes]:
        """Yields the chunks as server-sent events."""
        begin = dumps(self.head)[:-1]
        async for chunk in chunks:
            if chunk == nothing_yet():
                yield KEEP_ALIVE
            elif self.has_usage or "usage" not in chunk:
                yield b"data: %b,%b\n\n" % (begin, dumps(chunk)[1:])
        yield b"data: [DONE]\n\n"


class Server(uvicorn.Server):
    """Serves the engine of a rollout as the model `name`, and the rollout as NAME+tools.

    A model without Qwen3's markers is served alone; of a model behind an endpoint only the rollout.

    make_environment(question, preference, seed): the environment of an attempt. defaults:
    parameters where a body has none. host: where it listens. key: "" to serve every client.
    more(server, check): one more route, whose requests `check` checks, and its lifespan.
    about: what the page says of NAME+tools, as `OpenQuestions.facts` returns it. needs_tools: the
    model knows only tasks with tools, so that a chat of NAME without any is refused. record: is
    called with each attempt that has ended.
    """

    def __init__(
        self,
        rollout: Rollout,
        name: str,
        make_environment: MakeEnvironment,
        defaults: Json,
        host: str = "127.0.0.1",
        key: str = "",
        more: Callable[..., tuple[Route, Any]] | None = None,
        about: Json | None = None,
        needs_tools: bool = False,
        record: Record | None = None,
    ):
        self.rollout, self.make_environment = rollout, make_environment
        self.needs_tools = needs_tools
        if rollout.engine is None:
            context = rollout.settings.context_tokens
            self.limits = Limits(rollout.tokenizer.vocab_size, context, context)
        else:
            self.limits = rollout.engine.limits
        self.defaults = defaults | {"max_tokens": self.limits.context}
        self.host, self.key = host, key
        self.service, self.alone = Service(rollout.engine, record), name
        self.models = [] if rollout.engine is None else [name]
        if rollout.tokenizer.markers:
            self.models.append(name + SERVED)
        self.grammars = Grammars(rollout.tokenizer)
        self.facts = {"models": self.models} | (about or {})
        route, lifespan = more(self, self._check_client) if more is not None else (None, None)
        most_bytes = (1 << 16) + 32 * self.limits.context
        app = application(refuse, host, most_bytes, lifespan)
        key_needed = [Depends(self._check_key)]
        app.get("/")(self._page)
        app.get("/page.json", include_in_schema=False, dependencies=key_needed)(self._page_facts)
        app.get("/health")(self._health)
        app.get("/metrics", response_class=PlainTextResponse)(self._metrics)
        app.get("/v1/models")(self._list_models)
        for path, complete in ((CHAT, self._chat), ("/v1/completions", self._continue)):
            app.post(path, responses=REPLIES, dependencies=key_needed)(complete)
        if route is not None:
            app.router.routes.append(route)
        self.has_mcp = route is not None
        config = uvicorn.Config(
            app, ws="none", log_level="warning", timeout_graceful_shutdown=int(DRAIN_S) + 5
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets what runs go on to its end, or to the deadline."""
        asyncio.get_running_loop().call_later(DRAIN_S, self.service.end)
        await super().shutdown(sockets)
        self.service.close()

    async def _page(self) -> HTMLResponse:
        """A page to chat."""
        return HTMLResponse(PAGE, headers={"content-security-policy": PAGE_POLICY})

    async def _page_facts(self) -> JSONResponse:
        """What the page knows of the models and the tools: no more than who may ask."""
        return JSONResponse(self.facts)

    async def _health(self) -> JSONResponse:
        """Answers while the server lives."""
        return JSONResponse({"status": "ok"})

    async def _list_models(self) -> JSONResponse:
        """The models."""
        return JSONResponse(list_of_models(self.models))

    async def _metrics(self) -> PlainTextResponse:
        """Counts of requests, pages and tokens, for Prometheus."""
        engine = self.service.engine
        if engine is None:
            rows = {"requests_running": len(self.service.remote)}
        else:
            queues, blocks = engine.scheduler, engine.blocks
            rows = {f"{name}_total": value for name, value in engine.stats.items()}
            rows |= self.service.seconds | {
                "requests_waiting": len(queues.waiting),
                "requests_running": len(queues.running),
                "pages": blocks.num_pages,
                "pages_used": blocks.num_pages - blocks.available,
            }
        lines = [f"nanorchestra_{name} {value}\n" for name, value in rows.items()]
        return PlainTextResponse("".join(lines))

    async def _chat(self, body: ChatRequest) -> Response:
        """Answers a conversation: NAME samples the model, NAME+tools runs the server's tools."""
        return await self._complete(body)

    async def _continue(self, body: CompletionRequest) -> Response:
        """Continues texts or ids."""
        return await self._complete(body)

    async def _check_key(self, credentials: Credentials) -> None:
        """Raises HTTPException if the client may not ask."""
        given = credentials.credentials if credentials else ""
        if self.key and not secrets.compare_digest(given.encode(), self.key.encode()):
            raise HTTPException(401, "the API key is missing or wrong")

    async def _check_client(self, request: Request) -> None:
        """Raises HTTPException if the client may not ask."""
        await self._check_key(await BEARER(request))

    async def _complete(self, body):
        """Answers a body, at once or as a stream. What is cheap is checked first."""
        body = body.with_defaults(self.defaults)
        self._check(body)
        is_alone, too_long = body.model == self.alone, ""
        try:
            prompts = await asyncio.to_thread(self._prompts, body)
        except UserError as error:
            if is_alone or len(body.messages) == 1:
                raise
            # A world's task stands alone: orchestrate.py knows whether this is one.
            body, too_long = body.model_copy(update={"messages": body.messages[-1:]}), str(error)
            await asyncio.to_thread(self._prompts, body)
        if is_alone:
            form = body.form()
            guide = None if form is None else await self.grammars.guide(form)
            choices = as_choices(body, prompts, guide)
            chunks = sampled(self.service, self.rollout.tokenizer, body, choices)
        else:
            chunks = orchestrated(self.service, self.rollout, self.make_environment, body, too_long)
        return answer(body, chunks)

    def _check(self, body):
        """Raises UserError or HTTPException for a body that this server does not serve."""
        if body.model not in self.models:
            raise HTTPException(404, f"model: it must be {' or '.join(self.models)}")
        is_chat, is_alone = isinstance(body, ChatRequest), body.model == self.alone
        require(is_chat or is_alone, f"model: {body.model} needs {CHAT}")
        require(
            not (self.needs_tools and is_chat and is_alone and not body.tools),
            f"model: {self.alone} knows only its world's tools, and babbles without any; ask "
            f"for {self.models[-1]}",
        )
        self.service.check_room(body.choices)

    def _prompts(self, body):
        """The ids of the prompts of a body. UserError if they do not fit the context."""
        prompts = body.prompts(self.rollout.tokenizer)
        for ids in prompts:
            self.limits.check_length(len(self.limits.check_ids(ids)), sampled=1)
        return prompts


def list_of_models(names: list[str]) -> Json:
    """Returns OpenAI's list of models."""
    model = {"object": "model", "created": 0, "owned_by": "nanorchestra"}
    return {"object": "list", "data": [model | {"id": name} for name in names]}


class Parts(StreamingResponse):
    """A body in parts. It begins with the first, so that an error before it has its own status."""

    async def stream_response(self, send: Send) -> None:
        """Sends the parts; a client that leaves ends this."""
        held = []

        async def late(message):
            held.append(message)
            while "body" in message and held:
                await send(held.pop(0))

        await super().stream_response(late)


async def sampled(service, tokenizer, body, prompts):
    """Yields the chunks of an answer of the model alone; the last is the usage.

    prompts: (ids, SamplingParams) of each choice.
    """
    choices = [Choice(body, i, tokenizer, ids) for i, (ids, _) in enumerate(prompts)]
    first = {}  # what the first chunk has beside its choices
    if body.return_token_ids:
        first["prompt_token_ids"] = prompts[0][0]
    async with aclosing(service.sample(prompts)) as news:
        async for pairs in news:
            chunks = [choice.feed(*pair) for choice, pair in zip(choices, pairs, strict=True)]
            chunks = [chunk for chunk in chunks if chunk]
            if chunks:
                yield first | {"choices": chunks}
                first = {}
            if all(choice.finish_reason for choice in choices):  # a stop, before the ids end
                break
    prompt = sum(len(ids) for ids, _ in prompts[:: body.n])
    count = sum(choice.count for choice in choices)
    cached = sum(request.cached_tokens or 0 for request, _ in pairs)
    reasoning = sum(choice.reasoning(pair[0]) for choice, pair in zip(choices, pairs, strict=True))
    yield {"choices": [], "usage": usage(prompt, count, cached, reasoning)}


def answer(body: AnyRequest, chunks: AsyncIterator[Json]) -> Response:
    """Returns the response of the chunks, at once or as a stream."""
    writer = ChunkWriter(body)
    parts = until_error(writer.stream(chunks) if body.stream else writer.whole(chunks))
    media = "text/event-stream" if body.stream else "application/json"
    return Parts(parts, media_type=media, background=BackgroundTask(chunks.aclose))


async def until_error(parts):
    """Yields the parts of an answer; an error after the first ends a stream as its last event."""
    begun = False
    try:
        async for part in parts:
            begun = True
            yield part
    except Exception as error:
        if not begun:
            raise
        if not isinstance(error, REFUSED):
            logging.exception("an answer failed")
        _, body = refusal(error)
        yield b"data: %b\n\n" % dumps(body)


def refusal(error: Exception) -> tuple[int, Refusal]:
    """Returns the status for an exception, and OpenAI's form of it."""
    status, line, field = problem_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = error.code if isinstance(error, UserError) else None
    return status, {"error": {"message": line, "type": kind, "param": field, "code": code}}


async def refuse(request: Request, error: Exception) -> Response:
    """Returns the response for an exception."""
    status, body = refusal(error)
    return JSONResponse(body, status)


def serve_http(server: Server, port: int) -> None:
    """Listens until SIGTERM or SIGINT. UserError if it cannot."""
    listening = listen(server.host, port)
    place = address(listening)
    more = f", MCP at {place}/mcp" if server.has_mcp else ""
    print(f"{' and '.join(server.models)} at {place}/v1, the page at {place}/{more}", flush=True)
    serve(server, listening)
