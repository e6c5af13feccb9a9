"""The routes of the server: who may ask, what is answered, how errors look and how it ends."""

import asyncio
import hmac
import secrets
import signal
import socket
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from nanorchestra.agent.loop import Rollout
from nanorchestra.errors import UserError
from nanorchestra.schemas import Json
from nanorchestra.serving.orchestrate import MakeEnvironment, Orchestration
from nanorchestra.serving.protocol import (
    OPENAPI,
    Choice,
    as_choices,
    dumps,
    merge,
    read_body,
    usage,
)
from nanorchestra.serving.service import ApiError, Limits, Service

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
POLICY = {"content-security-policy": "default-src 'unsafe-inline'; connect-src 'self'"}
LOCAL = ["localhost", "127.0.0.1", "["]  # "[": what starlette makes of [::1] and a port
JSON = "application/json"
FORMS = {
    "/v1/chat/completions": ("ChatRequest", "chat.completion", ".chunk"),
    "/v1/completions": ("CompletionRequest", "text_completion", ""),
}


class Server(uvicorn.Server):
    """Serves the engine of a rollout as the model `name`, and the rollout as NAME+tools.

    make_environment(question, wish, seed): the environment of an attempt. given: parameters where
    a body has none. key: "" to serve every client. hosts: names that clients may use.
    """

    def __init__(
        self,
        rollout: Rollout,
        name: str,
        make_environment: MakeEnvironment,
        given: Json,
        key: str = "",
        hosts: list[str] | None = None,
        limits: Limits | None = None,
    ):
        room = rollout.engine.max_context
        self.rollout, self.make_environment = rollout, make_environment
        self.names, self.key = (name, f"{name}+tools"), key
        self.given = given | {"max_tokens": room}
        self.limits = limits or Limits(body_bytes=(1 << 16) + 32 * room)
        self.service = Service(rollout.engine, self.limits)
        owner = {"object": "model", "created": 0, "owned_by": "nanorchestra"}
        models = {"object": "list", "data": [{"id": name} | owner for name in self.names]}
        published = {"/openapi.json": OPENAPI, "/health": {"status": "ok"}, "/v1/models": models}
        routes = [
            Route("/", lambda request: HTMLResponse(PAGE, headers=POLICY)),
            Route("/metrics", lambda request: Response(self._metrics())),
            *(
                Route(path, lambda request: answer(published[request.url.path]))
                for path in published
            ),
            *(Route(path, self._complete, methods=["POST"]) for path in FORMS),
        ]
        kinds = HTTPException, UserError, ClientDisconnect, Exception
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=hosts or LOCAL)
        refusals = dict.fromkeys(kinds, refuse)
        app = Starlette(routes=routes, middleware=[hosts], exception_handlers=refusals)
        stop = int(self.limits.drain_s) + 5
        config = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": stop}
        super().__init__(uvicorn.Config(app, **config))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets what runs go on to its end, or to the deadline."""
        self.service.drain()
        await super().shutdown(sockets)
        self.service.jobs.put(None)

    def _metrics(self):
        engine, rows = self.rollout.engine, dict(self.service.seconds)
        rows |= {f"{name}_total": value for name, value in engine.stats.items()}
        rows["requests_waiting"] = len(engine.scheduler.waiting)
        rows["requests_running"] = len(engine.scheduler.running)
        rows["pages"] = engine.cache.num_pages
        rows["pages_used"] = engine.cache.num_pages - engine.cache.available
        return "".join(f"nanorchestra_{name} {value}\n" for name, value in rows.items())

    async def _body(self, request, form):
        """A checked body. ApiError if the client may not ask, or asks too much."""
        given, limits = request.headers.get("authorization", "").encode(), self.limits
        if self.key and not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise ApiError("the API key is missing or wrong", 401)
        if request.headers.get("content-type", "").partition(";")[0] != JSON:
            raise ApiError(f"the Content-Type must be {JSON}", 415)
        raw, size = b"", 0
        try:
            async with asyncio.timeout(limits.body_s):
                async for part in request.stream():
                    size += len(part)
                    raw += part if size <= limits.body_bytes else b""
        except TimeoutError:
            raise ApiError("the body did not come in time", 408) from None
        if size > limits.body_bytes:
            raise ApiError(f"the body has more than {limits.body_bytes} bytes", 413)
        body = await asyncio.to_thread(read_body, raw, form, self.given)
        if body["model"] not in self.names:
            raise ApiError(f"model: it must be {' or '.join(self.names)}", 404, "model")
        return body

    async def _complete(self, request) -> Response:
        """Answers a body, at once or as a stream."""
        form, kind, chunk = FORMS[request.url.path]
        body = await self._body(request, form)
        if body["model"] == self.names[0]:
            tokenizer = self.rollout.tokenizer
            choices = await asyncio.to_thread(as_choices, body, tokenizer)
            work = self.service.open(choices)
            chunks = sampled(work, [Choice(body, i, tokenizer) for i in range(len(choices))])
        else:
            work = Orchestration(self.service, self.rollout, self.make_environment, body)
            chunks = work.chunks()
        head = {"id": secrets.token_hex(12), "created": int(time.time()), "model": body["model"]}
        if body["stream"]:
            lines = events(head | {"object": kind + chunk}, chunks, body["stream_options"])
            end = BackgroundTask(work.close)
            return StreamingResponse(lines, media_type="text/event-stream", background=end)
        tasks = whole, gone = [asyncio.ensure_future(f) for f in (collect(chunks), left(request))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
            return answer(head | {"object": kind} | whole.result())
        finally:
            work.close()
            for task in tasks:
                task.cancel()


async def left(request):
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def sampled(work, choices):
    """Yields the chunks of an answer's choices; the last is the usage."""
    body, requests = choices[0].body, work.requests
    async for index, tokens, reason in work:
        choice, request = choices[index], requests[index]
        if not choice.finish_reason and (tokens or reason):
            first = body["return_token_ids"] and not choice.count
            prompt = {"prompt_token_ids": request.ids[: request.prompt_tokens]} if first else {}
            yield prompt | {"choices": [choice.feed(tokens, reason)]}
            if choice.finish_reason and not reason:
                work.abort(request)
    prompt = sum(request.prompt_tokens for request in requests[:: body["n"]])
    cached = sum(request.completion.cached_tokens for request in requests)
    count = sum(choice.count for choice in choices)
    yield {"choices": [], "usage": usage(prompt, count, cached)}


async def collect(chunks):
    """Returns one answer of all chunks."""
    whole, choices = {}, defaultdict(dict)
    async for chunk in chunks:
        for choice in chunk.pop("choices"):
            merge(choices[choice["index"]], choice)
        whole |= chunk
    for choice in choices.values():
        if delta := choice.pop("delta", None):
            choice["message"] = {"content": None} | delta
            for call in delta.get("tool_calls", ()):
                del call["index"]
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


async def events(head, chunks, options):
    """Yields the chunks as server-sent events; an error ends them."""
    end = b"[DONE]"
    try:
        async for chunk in chunks:
            if options.get("include_usage") or "usage" not in chunk:
                yield b"data: %b\n\n" % dumps(head | chunk)
    except UserError as error:
        end = refuse(None, error).body
    yield b"data: %b\n\n" % end


def answer(value: Any, status: int = 200) -> Response:
    """Returns a response of JSON."""
    return Response(dumps(value), status, media_type=JSON)


def refuse(request: Any, error: Exception) -> Response:
    """Returns the response for an exception, in OpenAI's form."""
    status, message = getattr(error, "status", 400), str(error)
    if not isinstance(error, UserError):
        status = getattr(error, "status_code", 500)
        message = getattr(error, "detail", "internal error")
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": message, "type": kind, "param": getattr(error, "param", None)}
    return answer({"error": said | {"code": None}}, status)


def serve_http(server: Server, host: str, port: int) -> None:
    """Listens until SIGTERM or SIGINT. UserError if it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: {error}") from None
    place = f"http://{host}:{listening.getsockname()[1]}"
    print(f"{' and '.join(server.names)} at {place}/v1, the page at {place}/", flush=True)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again at its end
        signal.signal(number, lambda *_: None)
    server.run([listening])
