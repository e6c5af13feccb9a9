"""Posts JSON to a server and reads its JSON reply, whatever the server does.

Time, tries, bytes of a reply and its nesting are bounded; each failure is one line. A reply may
come as server-sent events, which are told as they come. The API key and the values of headers come
from environment variables, go to the address that was named, and reach no message. No redirect is
followed and ~/.netrc is not read. An https:// address is reached through the proxy of the variable
HTTPS_PROXY, unless NO_PROXY excepts it: a tunnel, which sees neither key nor text. An http://
address is reached directly.
"""

import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any, Protocol

from requests import ConnectionError as NoConnection
from requests import Request, Session
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from nanorchestra.agent.failures import is_temporary
from nanorchestra.agent.threads import in_daemon, pause
from nanorchestra.errors import UserError
from nanorchestra.schemas import Json, bounded_json
from nanorchestra.validation import Form, validated

MOST_REQUESTS = 3  # for one reply
BAD_REQUEST = (400, 413, 422)  # the request is at fault: too long, or not accepted
CONNECT_S = 10.0  # for each address of a host, and for its TLS handshake
MOST_BYTES = 8 << 20  # of a reply, or of one of its events
MOST_EVENTS_BYTES = 64 << 20  # of a reply in events, of about 300 bytes a token
MOST_CHARS = 300  # of a message
SECRET_CHARS = 8  # a shorter key, like "EMPTY", may be a word of a reply
MESSAGE = re.compile(r'"(?:message|detail|error)"\s*:\s*("(?:[^"\\]|\\.)+")')
BYTES_PER_TOKEN = 3  # of text whose tokens are not known; rather too many tokens than too few
EVENT, LAST_EVENT = b"data:", b"[DONE]"  # before the JSON of an event, and in place of it

logging.getLogger("urllib3").setLevel(logging.CRITICAL)  # what a server does wrong is an error


@dataclass(frozen=True)
class Reply:
    """What was replied to a request, as JSON, or the `problem` that there was.

    tokens: input and output, of a model that has worked for it: of a chat's reply as the server
    counts them, of a failure by its bytes. retries: requests that were repeated. seconds: of all.
    waited: of these seconds, those before the last request. A problem is the infrastructure's, but
    for a bad_request, whose text is at fault, and one that was given_up, since the user's seconds
    were over. status: the HTTP status of a refusal, 0 if there was none.
    """

    content: Any = None
    tokens: tuple[int, int] = (0, 0)
    retries: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    problem: str = ""
    bad_request: bool = False
    given_up: bool = False
    status: int = 0

    @property
    def worked(self) -> bool:
        """Whether a model has worked for it and is paid: for a reply, or a failure with tokens."""
        return not self.problem or any(self.tokens)

    @property
    def final(self) -> bool:
        """Whether the same request would be answered alike, whenever it is asked."""
        return not self.problem or self.bad_request

    @property
    def infrastructure(self) -> bool:
        """Whether the infrastructure has failed the request."""
        return not self.final and not self.given_up


@dataclass
class RequestError(Exception):
    """One request has failed.

    worked: whether a model may have worked for it; `text` is what it has written. again: whether
    the request may be repeated, `retry_after` seconds later at the earliest. status: of a refusal.
    None is both, so that the most that one request can cost is enough for all.
    """

    problem: str
    worked: bool = False
    text: str = ""
    again: bool = False
    retry_after: float = 0.0
    bad_request: bool = False
    status: int = 0


class Events(Protocol):
    """Joins the events of a reply. `form` is that of an event.

    text: what a model has written so far, of which tokens are estimated. ended: whether the reply
    has all that it needs.
    """

    form: type[Any]
    text: str
    ended: bool

    def add(self, event: Any) -> None:
        """Takes the next event."""

    def whole(self) -> Json:
        """Returns the reply, as it would have come without events."""


def post(
    url: str,
    body: Json,
    form: type[Form],
    key_variable: str,
    timeout_s: float,
    header_variables: Mapping[str, str] = MappingProxyType({}),
    most_requests: int = MOST_REQUESTS,
    events: Events | None = None,
) -> Reply:
    """Returns the reply to a request, with its JSON in a form as content, or with the problem.

    All of it takes `timeout_s` seconds at most. A connection error and the status 408, 409, 429 or
    from 500 are tried again, after a random wait or as long as the server's Retry-After says, until
    `most_requests` were made; not if nothing waits for the call any more. The key is in the
    environment variable `key_variable`, the value of each header in that of `header_variables`; one
    that is not set is not sent. The reply is as `bounded_json` reads it, and its tokens are for the
    caller to count; those of a failure are estimated. With `events` the reply may come as such;
    after the first of them no request is repeated.
    """
    key = secret(key_variable).replace(" ", "")
    values = {name: secret(variable) for name, variable in header_variables.items()}
    secrets = [key, *values.values()]
    headers = {"Content-Type": "application/json", "User-Agent": "nanorchestra"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    headers |= {name: value for name, value in values.items() if value}
    sent = json.dumps(body)
    start = time.monotonic()
    end, waited = start + timeout_s, 0.0
    for retries in range(most_requests):
        try:
            content = _ask(url, sent.encode(), headers, end, timeout_s, form, secrets, events)
            seconds = time.monotonic() - start
            return Reply(content, retries=retries, seconds=seconds, waited=waited)
        except RequestError as failure:
            error = failure
        wait = max(error.retry_after, 2.0 ** (retries + 1) * random.uniform(0.5, 1.0))
        is_last = retries == most_requests - 1 or time.monotonic() + wait >= end
        if not error.again or is_last or not pause(wait):
            break
        waited = time.monotonic() - start
    problem = " ".join(masked(error.problem, secrets).split())
    if key_variable and not key and error.status == 401:
        problem = f"the environment variable {key_variable} is not set; {problem}"
    return Reply(
        tokens=(count_tokens(sent), count_tokens(error.text)) if error.worked else (0, 0),
        retries=retries,
        seconds=time.monotonic() - start,
        waited=waited,
        problem=problem[:MOST_CHARS],
        bad_request=error.bad_request,
        status=error.status,
    )


def secret(variable: str) -> str:
    """Returns the value of an environment variable as a header can hold it; "" if it is not set."""
    return " ".join(os.environ.get(variable, "").split())


def masked(text: str, secrets: list[str], least: int = 1) -> str:
    """Returns a text without the secrets; those of fewer characters than `least` stay."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= least:
            text = text.replace(value, "...")
    return text


def count_tokens(text: str) -> int:
    """Returns an estimate of the tokens of a text, from its bytes."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def _ask(url, sent: bytes, headers, end, timeout_s, form, secrets, events) -> Any:
    """Returns the JSON of the reply to one request, by the time `end`. Raises RequestError.

    It is made in a thread of its own, since requests bounds neither the look-up of a name nor
    headers that drip. A model may have worked for a request that was sent whole.
    """
    content = BytesIO(sent)  # the connection reads what it sends
    asking = in_daemon(partial(_exchange, url, content, headers, end, form, secrets, events))
    try:
        return asking.result(max(end - time.monotonic(), 0.0))
    except TimeoutError:
        problem = f"no whole reply within {round(timeout_s, 3):g} s"
        text = events.text if events else ""
        raise RequestError(problem, worked=content.tell() == len(sent), text=text) from None


def _exchange(url, content, headers, end, form, secrets, events) -> Any:
    """Returns the JSON of the reply to one request. RequestError; TimeoutError from `end` on.

    requests bounds the connection and each wait for bytes; the chunks are bounded here. So a thread
    that nothing waits for any more ends, too.
    """
    left = max(end - time.monotonic(), 0.001)
    status, count, data, problem = 0, 0, bytearray(), ""
    streams, ended, most = False, False, MOST_BYTES
    try:
        request = Request("POST", url, headers, data=content).prepare()
        with Session() as session:
            session.trust_env = url.startswith("https:")  # a proxy can read what goes to http://
            settings = session.merge_environment_settings(url, {}, True, None, None)
            settings["timeout"] = (min(CONNECT_S, left), left)
            # By the adapter: it follows no redirect, of which Session.send reads the whole body.
            with session.get_adapter(url).send(request, **settings) as reply:
                status = reply.status_code
                kind = reply.headers.get("Content-Type", "")
                if events is not None and status < 300 and kind.startswith("text/event-stream"):
                    streams, most = True, MOST_EVENTS_BYTES
                while count <= most and not ended and time.monotonic() < end:
                    # What has come; iter_content waits for as much as it is asked for.
                    chunk = reply.raw.read1(1 << 16, decode_content=True)
                    if not chunk:
                        break
                    count += len(chunk)
                    data += chunk
                    if streams and b"\n" in chunk:
                        *lines, data = data.split(b"\n")
                        ended = _add(lines, events, secrets)
                if streams and not ended:  # the last line may have no end
                    try:
                        ended = _add([data], events, secrets)
                    except RequestError:
                        problem = "the reply breaks off"
    except (OSError, HTTPError, ValueError) as error:  # what requests raises is an OSError
        if not status:
            again = isinstance(error, NoConnection)
            raise RequestError(f"no connection ({_cause(error)})", again=again) from None
        problem = "the reply breaks off"
    if time.monotonic() >= end:
        raise TimeoutError
    text = data.decode("utf-8", "replace")
    if status >= 300:
        raise _refusal(reply, text)
    if count > most:
        problem = f"the reply has more than {most >> 20} MiB"
    if streams and (ended or events.ended):  # whatever came after it
        problem = ""
    elif streams and not problem:
        problem = "the reply breaks off"
    if streams:
        text = events.text if problem else json.dumps(events.whole())
    if problem:
        raise RequestError(problem, worked=True, text=text)
    return _json_of(text, form, secrets)


def _add(lines, events, secrets) -> bool:
    """Gives `events` those in lines of a reply; returns whether one is the last. RequestError."""
    for line in lines:
        data = line.removeprefix(EVENT).strip()
        if not line.startswith(EVENT) or not data:  # an empty line, a comment, an event's name
            continue
        if data == LAST_EVENT:
            return True
        try:
            events.add(_json_of(data.decode("utf-8", "replace"), events.form, secrets))
        except RequestError as error:
            if events.text:
                error.worked, error.text = True, events.text
            raise
    return False


def _cause(error) -> str:
    """Returns what was raised first, which urllib3 and requests have wrapped."""
    while error.__context__:
        error = error.__context__
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refusal(reply, text) -> RequestError:
    """Returns the error of a reply that is an HTTP error or a redirect, with the body `text`."""
    status, retry_after = reply.status_code, 0.0
    said = _message(text)
    if status < 400:
        said = f"redirected to {reply.headers.get('Location', 'nowhere')}, which is not followed"
    with suppress(HTTPError, ValueError, OverflowError):  # a Retry-After that cannot be read
        retry_after = Retry().get_retry_after(reply.raw) or 0.0
    return RequestError(
        f"HTTP {status}: {said}",
        again=is_temporary(status),
        retry_after=retry_after,
        bad_request=status in BAD_REQUEST,
        status=status,
    )


def _message(body) -> str:
    """Returns the message of the error object that a body has, or the body.

    '{"error": {"message": "too long", "code": 7}}' says "too long".
    """
    if match := MESSAGE.search(body):
        with suppress(ValueError):
            return json.loads(match[1], strict=False)
    return body


def _json_of(text, form, secrets) -> Any:
    """Returns the JSON of a reply. RequestError if it is another.

    No model has worked for a gateway's page, nor for an error object.
    """
    try:
        plain = json.dumps(bounded_json(text), ensure_ascii=False)  # a key as it is, not escaped
        reply = json.loads(masked(plain, secrets, SECRET_CHARS))
    except ValueError as error:
        said = text.strip()[:80] or "an empty reply"
        worked = text.lstrip().startswith("{")  # a reply that was begun
        raise RequestError(f"not JSON: {said} ({error})", worked=worked, text=text) from None
    if isinstance(reply, dict) and (error := reply.get("error")):
        code = error.get("code") if isinstance(error, dict) else None
        problem = f"the endpoint says: {_message(json.dumps({'error': error}))}"
        raise RequestError(problem, bad_request=code in BAD_REQUEST)
    try:
        return validated(form, reply, "not the reply that was asked for", extra="allow")
    except UserError as error:
        raise RequestError(str(error), worked=True, text=text) from None
