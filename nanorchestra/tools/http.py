"""Posts JSON to a server and reads its JSON reply, whatever the server does.

Time, tries, bytes of a reply and its nesting are bounded; each failure is one line. The
API key and the values of headers come from environment variables, go to the address that was named,
and reach no message. No redirect is followed and ~/.netrc is not read. An https:// address is
reached through the proxy of the variable HTTPS_PROXY, unless NO_PROXY excepts it: a tunnel, which
sees neither key nor text. An http:// address is reached directly.
"""

import json
import logging
import os
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any

from requests import ConnectionError as NoConnection
from requests import Request, Session
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from nanorchestra.agent.failures import EndpointError, is_temporary
from nanorchestra.agent.threads import in_daemon
from nanorchestra.errors import UserError
from nanorchestra.schemas import Json, bounded_json
from nanorchestra.validation import Form, validated

REQUESTS = 3
BAD_REQUEST = (400, 413, 422)  # the request is at fault: too long, or not accepted
CONNECT_S = 10.0  # for each address of a host, and for its TLS handshake
MOST_BYTES = 8 << 20  # of a reply
MOST_CHARS = 300  # of a message
SECRET_CHARS = 8  # a shorter key, like "EMPTY", may be a word of a reply
MESSAGE = re.compile(r'"(?:message|detail|error)"\s*:\s*("(?:[^"\\]|\\.)+")')
BYTES_PER_TOKEN = 3  # of text whose tokens are not known; rather too many tokens than too few

logging.getLogger("urllib3").setLevel(logging.CRITICAL)  # what a server does wrong is an error


def post(
    url: str,
    body: Json,
    form: type[Form],
    key_variable: str,
    timeout_s: float,
    header_variables: Mapping[str, str] = MappingProxyType({}),
    requests: int = REQUESTS,
) -> tuple[Form, tuple[int, float, float]]:
    """Returns a JSON reply in a form, and (repeated requests, seconds, those waited).

    All of it takes `timeout_s` seconds at most; those waited passed before the last request. A
    connection error and the status 408, 409, 429 or from 500 are tried again, after a random wait
    or as long as the server's Retry-After says, until `requests` were made. The
    key is in the environment variable `key_variable`, the value of each header in that of
    `header_variables`; one that is not set is not sent. The reply is as `bounded_json` reads it.
    Raises EndpointError.
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
    for attempt in range(requests):
        content = BytesIO(sent.encode())  # the connection reads what it sends
        asking = in_daemon(partial(_ask, url, content, headers, end, form, secrets))
        try:
            reply = asking.result(max(end - time.monotonic(), 0.0))
            return reply, (attempt, time.monotonic() - start, waited)
        except TimeoutError:
            received = None if content.read() else ""
            error = EndpointError(f"no whole reply within {round(timeout_s, 3):g} s", received)
        except EndpointError as refused:
            error = refused
        wait = max(error.wait or 0.0, 2.0 ** (attempt + 1) * random.uniform(0.5, 1.0))
        late = time.monotonic() + wait >= end
        if error.wait is None or late or attempt == requests - 1:
            break
        time.sleep(wait)
        waited = time.monotonic() - start
    problem = " ".join(masked(str(error), secrets).split())
    if key_variable and not key and "HTTP 401" in problem:
        problem = f"the environment variable {key_variable} is not set; {problem}"
    error.args = (problem[:MOST_CHARS],)
    error.spent = attempt, time.monotonic() - start, waited
    if error.received is not None:
        error.tokens = count_tokens(sent), count_tokens(error.received)
    raise error


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


def _ask(url, content, headers, end, form, secrets) -> Any:
    """Returns the reply to one request. EndpointError; TimeoutError from the time `end` on.

    requests bounds the connection and each wait for bytes; the chunks are bounded here. So a thread
    that nothing waits for any more ends, too.
    """
    left = max(end - time.monotonic(), 0.001)
    status, data, problem = 0, bytearray(), ""
    try:
        request = Request("POST", url, headers, data=content).prepare()
        with Session() as session:
            session.trust_env = url.startswith("https:")  # a proxy can read what goes to http://
            settings = session.merge_environment_settings(url, {}, True, None, None)
            settings["timeout"] = (min(CONNECT_S, left), left)
            # By the adapter: it follows no redirect, of which Session.send reads the whole body.
            with session.get_adapter(url).send(request, **settings) as reply:
                status = reply.status_code
                while len(data) <= MOST_BYTES and time.monotonic() < end:
                    # What has come; iter_content waits for as much as it is asked for.
                    chunk = reply.raw.read1(1 << 16, decode_content=True)
                    if not chunk:
                        break
                    data += chunk
    except (OSError, HTTPError, ValueError) as error:  # what requests raises is an OSError
        if not status:
            wait = 0.0 if isinstance(error, NoConnection) else None
            raise EndpointError(f"no connection ({_cause(error)})", wait=wait) from None
        problem = "the reply breaks off"
    if time.monotonic() >= end:
        raise TimeoutError
    text = data.decode("utf-8", "replace")
    if status >= 300:
        raise _refusal(reply, text)
    if len(data) > MOST_BYTES:
        problem = f"the reply has more than {MOST_BYTES >> 20} MiB"
    if problem:
        raise EndpointError(problem, text)
    return _json_of(text, form, secrets)


def _cause(error) -> str:
    """Returns what was raised first, which urllib3 and requests have wrapped."""
    while error.__context__:
        error = error.__context__
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _refusal(reply, text) -> EndpointError:
    """Returns the error of a reply that is an HTTP error or a redirect, with the body `text`."""
    status, wait = reply.status_code, None
    said = _message(text)
    if status < 400:
        said = f"redirected to {reply.headers.get('Location', 'nowhere')}, which is not followed"
    if is_temporary(status):
        wait = 0.0
        with suppress(HTTPError, ValueError, OverflowError):  # a Retry-After that cannot be read
            wait = Retry().get_retry_after(reply.raw) or 0.0
    return EndpointError(f"HTTP {status}: {said}", wait=wait, bad_request=status in BAD_REQUEST)


def _message(body) -> str:
    """Returns the message of the error object that a body has, or the body.

    '{"error": {"message": "too long", "code": 7}}' says "too long".
    """
    if match := MESSAGE.search(body):
        with suppress(ValueError):
            return json.loads(match[1], strict=False)
    return body


def _json_of(text, form, secrets) -> Any:
    """Returns the JSON of a reply. EndpointError if it is another; what was begun as JSON is kept.

    A gateway's page is no reply that was begun, nor is an error object.
    """
    begun = text if text.lstrip().startswith("{") else None
    try:
        plain = json.dumps(bounded_json(text), ensure_ascii=False)  # a key as it is, not escaped
        reply = json.loads(masked(plain, secrets, SECRET_CHARS))
    except ValueError as error:
        said = text.strip()[:80] or "an empty reply"
        raise EndpointError(f"not JSON: {said} ({error})", begun) from None
    if isinstance(reply, dict) and (error := reply.get("error")):
        code = error.get("code") if isinstance(error, dict) else None
        problem = f"the endpoint says: {_message(json.dumps({'error': error}))}"
        raise EndpointError(problem, bad_request=code in BAD_REQUEST)
    try:
        return validated(form, reply, "not the reply that was asked for", extra="allow")
    except UserError as error:
        raise EndpointError(str(error), text) from None
