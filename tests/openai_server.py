"""An OpenAI-compatible server on this machine that answers what a test has written."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """`answer(body)` returns the reply to a request: a chat completion (see `said`), or bytes.

    Or it returns a generator: the JSON of events (see `told`), or bytes, which are sent one by one.

    `status` is its HTTP status, `reply_headers` are its headers. `bodies` and `headers` hold what
    was asked. `raw(send)` takes the place of all that: it sends whatever bytes it wants, and the
    connection closes after it.
    """

    def __init__(self):
        self.bodies, self.headers, self.status, self.answer = [], [], 200, lambda body: said("42")
        self.reply_headers, self.raw = {}, None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                if server.raw:
                    self.close_connection = True
                    with contextlib.suppress(OSError):  # the client has gone away
                        server.raw(self.connection.sendall)
                    return
                reply = server.answer(body)
                if isinstance(reply, Iterator):
                    self.send_events(reply)
                    return
                reply = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(reply)))
                for name, value in server.reply_headers.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has gone away
                    self.wfile.write(reply)

            def send_events(self, events):
                self.close_connection = True
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream; charset=utf-8")
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has gone away
                    for event in events:
                        data = event
                        if not isinstance(event, bytes):
                            data = f"data: {json.dumps(event)}\n\n".encode()
                        self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@contextmanager
def openai_server() -> Iterator[Server]:
    served = Server()
    try:
        yield served
    finally:
        served.http.shutdown()
        served.http.server_close()


def said(content=None, calls=(), finish="stop", usage=(10, 5), **more):
    """A chat completion: `calls` are (name, arguments) pairs, `more` fields of the message."""
    calls = [
        {"id": f"theirs{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": calls or None} | more
    return {
        "choices": [{"message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
    }


DONE = b"data: [DONE]\n\n"


def told(whole, size=4):
    """The events of a chat completion, whose texts come in pieces of `size` characters."""
    choice = whole["choices"][0]
    message = dict(choice["message"])
    deltas = [{"role": message.pop("role")}]
    calls = message.pop("tool_calls") or []
    for name, text in sorted(message.items(), reverse=True):  # reasoning before content
        deltas += [{name: text[i : i + size]} for i in range(0, len(text or ""), size)]
    for index, call in enumerate(calls):
        function = call["function"]
        text, first = function["arguments"], {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [call | {"index": index, "function": first}]})
        for i in range(0, len(text), size):
            piece = {"index": index, "function": {"arguments": text[i : i + size]}}
            deltas.append({"tool_calls": [piece]})
    for delta in deltas:
        yield {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
    yield {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield {"choices": [], "usage": whole["usage"]}
    yield DONE
