"""The routes of the server: who may ask, what is answered, how errors look and how it ends."""

import asyncio
import re
import secrets
import signal
import socket
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
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
from nanorchestra.serving.service import Service

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
POLICY = {"content-security-policy": "default-src 'unsafe-inline'; connect-src 'self'"}
LOCAL = ["localhost", "127.0.0.1", "[::1]"]
JSON = "application/json"
BODY_S = 30.0  # that a body may take to come
DRAIN_S = 20.0  # until what runs is ended, once the server is
FORMS = {  # the form of a body, and what an answer and a chunk of a stream are called
    "/v1/chat/completions": ("ChatRequest", "chat.completion", "chat.completion.chunk"),
    "/v1/completions": ("CompletionRequest", "text_completion", "text_completion"),
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
        self.rollout, self.make_environment = rollout, make_environment
        self.given = given | {"max_tokens": rollout.engine.max_context}
        self.host, self.key = host, key
        self.service, self.models = Service(rollout.engine), [name, f"{name}+tools"]
        model = {"object": "model", "created": 0, "owned_by": "nanorchestra"}
        models = [model | {"id": name} for name in self.models]
        published = {
            "/": HTMLResponse(PAGE, headers=POLICY),
            "/health": JSONResponse({"status": "ok"}),
            "/openapi.json": JSONResponse(OPENAPI),
            "/v1/models": JSONResponse({"object": "list", "data": models}),
            "/metrics": self._metrics,
        }
        routes = [Route(path, said, methods=["GET"]) for path, said in published.items()]
        routes += [Route(path, self._complete, methods=["POST"]) for path in FORMS]
        refusals = dict.fromkeys((*REFUSED, ClientDisconnect, Exception), refuse)
        app = Starlette(routes=routes, exception_handlers=refusals)
        app = TrustedHostMiddleware(app, LOCAL if host in (*LOCAL, "::1") else ["*"])
        stop = int(DRAIN_S) + 5
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=stop))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets what runs go on to its end, or to the deadline."""
        asyncio.get_running_loop().call_later(DRAIN_S, self.service.end)
        await super().shutdown(sockets)
        self.service.jobs.put(None)

    def _metrics(self, request) -> Response:
        engine = self.service.engine
        queues, cache = engine.scheduler, engine.cache
        rows = {f"{name}_total": value for name, value in engine.stats.items()}
        rows |= self.service.seconds | {
            "requests_waiting": len(queues.waiting),
            "requests_running": len(queues.running),
            "pages": cache.num_pages,
            "pages_used": cache.num_pages - cache.available,
        }
        return Response("".join(f"nanorchestra_{name} {rows[name]}\n" for name in rows))

    async def _complete(self, request) -> Response:
        """Answers a body, at once or as a stream."""
        form, *kinds = FORMS[request.url.path]
        raw = await self._raw(request)
        body, chunks = await asyncio.to_thread(self._open, raw, form)
        head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": body["model"]}
        head["object"] = kinds[body["stream"]]
        if body["stream"]:
            media, parts = "text/event-stream", events(head, chunks, body["stream_options"])
        else:
            media, parts = JSON, whole(head, chunks)
        return Parts(parts, media_type=media, background=BackgroundTask(chunks.aclose))

    async def _raw(self, request):
        """The bytes of a body. HTTPException if the client may not ask, or sends too much."""
        given, raw = request.headers.get("authorization", "").encode(), b""
        if self.key and not secrets.compare_digest(given, f"Bearer {self.key}".encode()):
            raise HTTPException(401, "the API key is missing or wrong")
        if request.headers.get("content-type", "").partition(";")[0] != JSON:
            raise HTTPException(415, f"the Content-Type must be {JSON}")
        most = (1 << 16) + 32 * self.given["max_tokens"]
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > most:
                        raise HTTPException(413, f"the body has more than {most} bytes")
        except TimeoutError:
            raise HTTPException(408, "the body did not come in time") from None
        return raw

    def _open(self, raw, form):
        """A checked body, and the chunks of its answer."""
        body, rollout = read_body(raw, form, self.given), self.rollout
        if body["model"] not in self.models:
            raise HTTPException(404, f"model: it must be {' or '.join(self.models)}")
        if body["model"] == self.models[1]:
            return body, orchestrated(self.service, rollout, self.make_environment, body)
        asked = as_choices(body, rollout.tokenizer)
        return body, sampled(self.service, rollout.tokenizer, body, asked)


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


async def sampled(service, tokenizer, body, asked):
    """Yields the chunks of an answer of the model alone; the last is the usage."""
    choices = [Choice(body, i, tokenizer) for i in range(len(asked))]
    told = {"prompt_token_ids": asked[0][0]} if body["return_token_ids"] else {}
    async with aclosing(service.sample(asked)) as news:
        async for pairs in news:
            fed = [choice.feed(*pair) for choice, pair in zip(choices, pairs, strict=True)]
            if fed := list(filter(None, fed)):
                yield told | {"choices": fed}
                told = {}
            if all(choice.finish_reason for choice in choices):  # a stop, before the ids end
                break
    prompt = sum(len(ids) for ids, _ in asked[:: body["n"]])
    cached = sum(request.cached_tokens or 0 for request, _ in pairs)
    yield {"choices": [], "usage": usage(prompt, sum(choice.count for choice in choices), cached)}


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
    begin, end, begun = dumps(head)[:-1], b"[DONE]", False
    try:
        async for chunk in chunks:
            if options.get("include_usage") or "usage" not in chunk:
                begun = True
                yield b"data: %b,%b\n\n" % (begin, dumps(chunk)[1:])
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
    field = re.match(r"[\w.[\]]+(?=: )", message)  # a message begins with it
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
    host = f"[{server.host}]" if ":" in server.host else server.host
    place = f"http://{host}:{listening.getsockname()[1]}"
    print(f"{' and '.join(server.models)} at {place}/v1, the page at {place}/", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again at its end
        signal.signal(number, lambda *_: None)
    server.run([listening])
