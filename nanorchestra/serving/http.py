"""The routes of the server: who may ask, what is answered, how errors look and how it ends."""

import asyncio
import base64
import hashlib
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from nanorchestra.agent.loop import Rollout
from nanorchestra.engine.sequence import Limits
from nanorchestra.errors import UserError, require
from nanorchestra.schemas import Json
from nanorchestra.serving.grammars import Grammars
from nanorchestra.serving.listening import REFUSED, address, application, listen, read_raw, serve
from nanorchestra.serving.orchestrate import MakeEnvironment, orchestrated
from nanorchestra.serving.protocol import (
    KEEP_ALIVE,
    OPENAPI,
    Choice,
    as_choices,
    as_prompts,
    count_choices,
    dumps,
    form_of,
    merge,
    nothing_yet,
    read_body,
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


JSON = "application/json"
SMALL = 16 << 10  # bytes of a body that does not wait behind large ones
DRAIN_S = 20.0  # until what runs is ended, once the server is


class ChunkWriter:
    """Writes the chunks of a chat or of a completion, as one `answer` or each as a `chunk`."""

    def __init__(self, answer: str, chunk: str, body: Json):
        kind = chunk if body["stream"] else answer
        self.head = {"id": secrets.token_hex(12), "created": int(time.time())}
        self.head |= {"model": body["model"], "object": kind}
        self.has_usage = body["stream_options"].get("include_usage")

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


@dataclass(frozen=True)
class BodyForm:
    """The schema of a body, and what writes its answer."""

    schema: str
    writer: Callable[[Json], ChunkWriter]


CHAT = "/v1/chat/completions"
CHUNKS = partial(ChunkWriter, "chat.completion", "chat.completion.chunk")
TEXTS = partial(ChunkWriter, "text_completion", "text_completion")
FORMS = {
    CHAT: BodyForm("ChatRequest", CHUNKS),
    "/v1/completions": BodyForm("CompletionRequest", TEXTS),
}


class Server(uvicorn.Server):
    """Serves the engine of a rollout as the model `name`, and the rollout as NAME+tools.

    A model without Qwen3's markers is served alone; of a model behind an endpoint only the rollout.

    make_environment(question, preference, seed): the environment of an attempt. defaults:
    parameters where a body has none. host: where it listens. key: "" to serve every client.
    more(server, read): one more route, whose bodies `read` reads, and the lifespan that it needs.
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
            context = rollout.limits.context_tokens
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
        # A thread each: reading bodies holds the interpreter, which the engine needs too.
        self.small, self.large = (ThreadPoolExecutor(1, name) for name in ("small", "large"))
        self.facts = {"models": self.models} | (about or {})
        model = {"object": "model", "created": 0, "owned_by": "nanorchestra"}
        models = [model | {"id": name} for name in self.models]
        answers = {
            "/": HTMLResponse(PAGE, headers={"content-security-policy": page_policy(PAGE)}),
            "/page.json": self._page_facts,
            "/health": JSONResponse({"status": "ok"}),
            "/openapi.json": JSONResponse(OPENAPI),
            "/v1/models": JSONResponse({"object": "list", "data": models}),
            "/metrics": self._metrics,
        }
        routes = [Route(path, answer, methods=["GET"]) for path, answer in answers.items()]
        routes += [Route(path, self._complete, methods=["POST"]) for path in FORMS]
        lifespan = None
        if more is not None:
            route, lifespan = more(self, self._raw)
            routes.append(route)
        self.paths = [route.path for route in routes]
        config = uvicorn.Config(
            application(routes, refuse, host, lifespan),
            ws="none",
            log_level="warning",
            timeout_graceful_shutdown=int(DRAIN_S) + 5,
        )
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets what runs go on to its end, or to the deadline."""
        asyncio.get_running_loop().call_later(DRAIN_S, self.service.end)
        await super().shutdown(sockets)
        self.service.close()

    def _metrics(self, request) -> Response:
        engine = self.service.engine
        if engine is None:
            return Response(f"nanorchestra_requests_running {len(self.service.remote)}\n")
        queues, blocks = engine.scheduler, engine.blocks
        rows = {f"{name}_total": value for name, value in engine.stats.items()}
        rows |= self.service.seconds | {
            "requests_waiting": len(queues.waiting),
            "requests_running": len(queues.running),
            "pages": blocks.num_pages,
            "pages_used": blocks.num_pages - blocks.available,
        }
        return Response("".join(f"nanorchestra_{name} {rows[name]}\n" for name in rows))

    def _page_facts(self, request) -> Response:
        """What the page knows of the models and the tools: no more than who may ask."""
        self._check_key(request)
        return JSONResponse(self.facts)

    async def _complete(self, request) -> Response:
        """Answers a body, at once or as a stream."""
        form = FORMS[request.url.path]
        raw = await self._raw(request)
        body, chunks = await self._open(raw, form)
        return answer(form.writer(body), body, chunks)

    def _check_key(self, request):
        """Raises HTTPException if the client may not ask."""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.strip().encode(), self.key.encode())
        if self.key and not (is_right and scheme.lower() == "bearer"):
            raise HTTPException(401, "the API key is missing or wrong")

    async def _raw(self, request):
        """The bytes of a body. HTTPException if the client may not ask, or sends too much."""
        self._check_key(request)
        media = request.headers.get("content-type", "").partition(";")[0]
        if media.strip().lower() != JSON:
            raise HTTPException(415, f"the Content-Type must be {JSON}")
        most = (1 << 16) + 32 * self.defaults["max_tokens"]
        return await read_raw(request, most)

    async def _open(self, raw, form):
        """A checked body, and the chunks of its answer. What is cheap is checked first."""
        loop = asyncio.get_running_loop()
        thread = self.small if len(raw) <= SMALL else self.large
        body, prompts = await loop.run_in_executor(thread, self._read, raw, form)
        if body["model"] != self.alone:
            return body, orchestrated(self.service, self.rollout, self.make_environment, body)
        tokenizer, guide = self.rollout.tokenizer, None
        if (held := form_of(body)) is not None:
            guide = await self.grammars.guide(held)
        choices = as_choices(body, prompts, guide)
        return body, sampled(self.service, tokenizer, body, choices)

    def _read(self, raw, form):
        """A checked body, and the ids of its prompts, which fit the context."""
        body = read_body(raw, form.schema, self.defaults)
        if body["model"] not in self.models:
            raise HTTPException(404, f"model: it must be {' or '.join(self.models)}")
        is_chat = "messages" in body
        require(is_chat or body["model"] == self.alone, f"model: {body['model']} needs {CHAT}")
        plain = is_chat and body["model"] == self.alone and not body.get("tools")
        require(
            not (plain and self.needs_tools),
            f"model: {self.alone} knows only its world's tools, and babbles without any; ask "
            f"for {self.models[-1]}",
        )
        self.service.check_room(count_choices(body))
        try:
            return body, self._prompts(body)
        except UserError as error:
            if body["model"] == self.alone or len(body["messages"]) == 1:
                raise
            # A world's task stands alone: orchestrate.py knows whether this is one.
            body |= {"messages": body["messages"][-1:], "too_long": str(error)}
            return body, self._prompts(body)

    def _prompts(self, body):
        """The ids of the prompts of a body. UserError if they do not fit the context."""
        prompts = as_prompts(body, self.rollout.tokenizer)
        for ids in prompts:
            self.limits.check_length(len(self.limits.check_ids(ids)), sampled=1)
        return prompts


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
    if body["return_token_ids"]:
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
    prompt = sum(len(ids) for ids, _ in prompts[:: body["n"]])
    count = sum(choice.count for choice in choices)
    cached = sum(request.cached_tokens or 0 for request, _ in pairs)
    reasoning = sum(choice.reasoning(pair[0]) for choice, pair in zip(choices, pairs, strict=True))
    yield {"choices": [], "usage": usage(prompt, count, cached, reasoning)}


def answer(writer: ChunkWriter, body: Json, chunks: AsyncIterator[Json]) -> Response:
    """Returns the response of the chunks, at once or as a stream."""
    parts = writer.stream(chunks) if body["stream"] else writer.whole(chunks)
    parts = until_error(parts)
    media = "text/event-stream" if body["stream"] else JSON
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
        _, problem = problem_of(error)
        yield b"data: %b\n\n" % dumps({"error": problem})


def problem_of(error):
    """Returns the status for an exception, and OpenAI's form of it."""
    status, message = getattr(error, "status_code", 500), getattr(error, "detail", "internal error")
    if isinstance(error, UserError):
        status, message = 400, str(error)
    elif isinstance(error, TimeoutError):
        status, message = 504, "the request took too long"
    field = re.match(r"[\w.[\]]+(?=: )", message)  # a message begins with it
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = error.code if isinstance(error, UserError) else None
    return status, {"message": message, "type": kind, "param": field and field[0], "code": code}


def refuse(request: Any, error: Exception) -> Response:
    """Returns the response for an exception."""
    status, problem = problem_of(error)
    return JSONResponse({"error": problem}, status)


def serve_http(server: Server, port: int) -> None:
    """Listens until SIGTERM or SIGINT. UserError if it cannot."""
    listening = listen(server.host, port)
    place = address(listening)
    more = f", MCP at {place}/mcp" if "/mcp" in server.paths else ""
    print(f"{' and '.join(server.models)} at {place}/v1, the page at {place}/{more}", flush=True)
    serve(server, listening)
