"""The routes of the server: who may ask, what is answered, how errors look and how it ends."""

import asyncio
import re
import secrets
import signal
import socket
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from nanorchestra.agent.loop import Rollout
from nanorchestra.errors import UserError
from nanorchestra.schemas import Json
from nanorchestra.serving.orchestrate import MakeEnvironment, orchestrated
from nanorchestra.serving.protocol import (
    OPENAPI,
    Choice,
    as_choices,
    dumps,
    merge,
    read_body,
    usage,
)
from nanorchestra.serving.service import DRAIN_S, Service

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
POLICY = {"content-security-policy": "default-src 'unsafe-inline'; connect-src 'self'"}
LOCAL = ["localhost", "127.0.0.1", "["]  # names; "[": what starlette makes of [::1] and a port
JSON = "application/json"
BODY_S = 30.0  # that a body may take to come
FORMS = {
    "/v1/chat/completions": ("ChatRequest", "chat.completion", ".chunk"),
    "/v1/completions": ("CompletionRequest", "text_completion", ""),
}
REFUSED = HTTPException, UserError, TimeoutError


class Server(uvicorn.Server):
    """Serves the engine of a rollout as the model `name`, and the rollout as NAME+tools.

    make_environment(question, wish, seed): the environment of an attempt. given: parameters where
    a body has none. host: where it listens. key: "" to serve every client.
    """

    def __init__(
        self,
        rollout: Rollout,
        name: str,
        make_environment: MakeEnvironment,
        given: Json,
        host: str = "127.0.0.1",
        key: str = "",
    ):
        room = rollout.engine.max_context
        self.host, self.key, self.given = host, key, given | {"max_tokens": room}
        self.most = (1 << 16) + 32 * room  # bytes of a body
        self.service = Service(rollout.engine)
        self.models = {
            name: partial(answered, self.service, rollout.tokenizer),
            f"{name}+tools": partial(orchestrated, self.service, rollout, make_environment),
        }
        model = {"object": "model", "created": 0, "owned_by": "nanorchestra"}
        models = {"object": "list", "data": [model | {"id": name} for name in self.models]}
        published = {
            "/": HTMLResponse(PAGE, headers=POLICY),
            "/health": JSONResponse({"status": "ok"}),
            "/openapi.json": JSONResponse(OPENAPI),
            "/v1/models": JSONResponse(models),
            "/metrics": self._metrics,
        }
        routes = [Route(path, said, methods=["GET"]) for path, said in published.items()]
        routes += [Route(path, self._complete, methods=["POST"]) for path in FORMS]
        names = LOCAL if host in LOCAL or host == "::1" else ["*"]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=names)
        refusals = dict.fromkeys((*REFUSED, ClientDisconnect, Exception), refuse)
        app = Starlette(routes=routes, middleware=[hosts], exception_handlers=refusals)
        stop = int(DRAIN_S) + 5
        config = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": stop}
        super().__init__(uvicorn.Config(app, **config))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets what runs go on to its end, or to the deadline."""
        self.service.drain()
        await super().shutdown(sockets)
        self.service.jobs.put(None)

    def _metrics(self, request) -> Response:
        engine, rows = self.service.engine, dict(self.service.seconds)
        rows |= {f"{name}_total": value for name, value in engine.stats.items()}
        rows["requests_waiting"] = len(engine.scheduler.waiting)
        rows["requests_running"] = len(engine.scheduler.running)
        rows["pages"] = engine.cache.num_pages
        rows["pages_used"] = engine.cache.num_pages - engine.cache.available
        return Response("".join(f"nanorchestra_{name} {rows[name]}\n" for name in rows))

    async def _complete(self, request) -> Response:
        """Answers a body, at once or as a stream."""
        form, kind, chunk = FORMS[request.url.path]
        raw = await self._raw(request)
        body, chunks = await asyncio.to_thread(self._open, raw, form)
        head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": body["model"]}
        media, parts = JSON, whole(head | {"object": kind}, chunks)
        if body["stream"]:
            media, head = "text/event-stream", head | {"object": kind + chunk}
            parts = events(head, chunks, body["stream_options"])
        return Parts(parts, media_type=media, background=BackgroundTask(chunks.aclose))

    async def _raw(self, request):
        """The bytes of a body. HTTPException if the client may not ask, or sends too much."""
        given, raw = request.headers.get("authorization", "").encode(), b""
        if self.key and not secrets.compare_digest(given, f"Bearer {self.key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong")
        if request.headers.get("content-type", "").partition(";")[0] != JSON:
            raise HTTPException(415, f"the Content-Type must be {JSON}")
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > self.most:
                        raise HTTPException(413, f"the body has more than {self.most} bytes")
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        return raw

    def _open(self, raw, form):
        """A checked body, and the chunks of its answer."""
        body = read_body(raw, form, self.given)
        if body["model"] not in self.models:
            raise HTTPException(404, f"model: it must be {' or '.join(self.models)}")
        return body, self.models[body["model"]](body)


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


def answered(service, tokenizer, body):
    """Returns the chunks of an answer of the model alone."""
    asked = as_choices(body, tokenizer)
    return sampled(service, body, asked, [Choice(body, i, tokenizer) for i in range(len(asked))])


async def sampled(service, body, asked, choices):
    """Yields the chunks of the choices of an answer; the last is the usage."""
    cached = 0
    async with aclosing(service.sample(asked)) as news:
        async for index, request, tokens, reason in news:
            choice = choices[index]
            if reason:
                cached += request.cached_tokens or 0
            if choice.finish_reason or not (tokens or reason):
                continue
            first = body["return_token_ids"] and not choice.count
            prompt = {"prompt_token_ids": asked[index][0]} if first else {}
            yield prompt | {"choices": [choice.feed(tokens, reason)]}
            if choice.finish_reason and not reason:
                service.abort(request)
    prompt = sum(len(ids) for ids, _ in asked[:: body["n"]])
    count = sum(choice.count for choice in choices)
    yield {"choices": [], "usage": usage(prompt, count, cached)}


async def whole(head, chunks):
    """Yields one answer of all chunks."""
    choices = {}
    async for chunk in chunks:
        for choice in chunk.pop("choices"):
            merge(choices, {choice["index"]: choice})
        head |= chunk
    for choice in choices.values():
        if delta := choice.pop("delta", None):
            choice["message"] = {"content": None} | delta
            for call in delta.get("tool_calls", ()):
                del call["index"]
    yield dumps(head | {"choices": [choices[index] for index in sorted(choices)]})


async def events(head, chunks, options):
    """Yields the chunks as server-sent events; an error after the first ends them."""
    begun, end = False, b"[DONE]"
    try:
        async for chunk in chunks:
            if options.get("include_usage") or "usage" not in chunk:
                begun = True
                yield b"data: %b\n\n" % dumps(head | chunk)
    except REFUSED as error:
        if not begun:
            raise
        end = refuse(None, error).body
    yield b"data: %b\n\n" % end


def refuse(request: Any, error: Exception) -> Response:
    """Returns the response for an exception, in OpenAI's form. A message begins with its field."""
    status, message = getattr(error, "status_code", 500), getattr(error, "detail", "internal error")
    if isinstance(error, UserError):
        status, message = 400, str(error)
    elif isinstance(error, TimeoutError):
        status, message = 504, "the request took too long"
    field = re.match(r"[\w.[\]]+(?=: )", message)
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": message, "type": kind, "param": field and field[0], "code": None}
    return JSONResponse({"error": said}, status)


def serve_http(server: Server, port: int) -> None:
    """Listens until SIGTERM or SIGINT. UserError if it cannot."""
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        listening = socket.create_server((server.host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {server.host} --port {port}: {error}") from None
    place = f"http://{server.host}:{listening.getsockname()[1]}"
    print(f"{' and '.join(server.models)} at {place}/v1, the page at {place}/", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again at its end
        signal.signal(number, lambda *_: None)
    server.run([listening])
