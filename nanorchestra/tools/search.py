"""Searches the web by Tavily, reads the best pages, and keeps every reply on disk.

A stored reply keeps its price and latency, so that a run repeats itself. Offline, only stored
replies are read. The API key comes from the environment and reaches no message and no file.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import requests
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, write_whole
from nanorchestra.records import ToolResult, arguments_schema
from nanorchestra.tools.experts import within

KEY_VARIABLE = "TAVILY_API_KEY"
QUERY_CHARS = 400  # Tavily's limit
PAGE_CHARS = 10_000  # of a document; a page is cut there
MIN_CHARS = 100  # of a page; a shorter one is replaced by the excerpts of the search
_REPLY = Draft202012Validator(read_json(Path(__file__).with_name("search.json")))
_AGAIN = Retry(
    2,
    backoff_factor=0.5,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,
    raise_on_status=False,
)


class _SearchError(Exception):
    """There is no reply; the message says why."""


@dataclass
class WebSearch:
    """Documents of the web for a query. `cache` is a directory; prices are Tavily's, in USD.

    UserError without a key, unless `offline`.
    """

    name: str
    description: str
    cache: str
    pages: int = 5
    offline: bool = False
    usd_per_search: float = 0.01
    usd_per_page: float = 0.002
    timeout_s: float = 60.0
    base_url: str = "https://api.tavily.com"
    kind, blocking = "search", True
    parameters = arguments_schema(query="string")

    def __post_init__(self) -> None:
        problem = f"{self.name}: the environment variable {KEY_VARIABLE} is not set; set it, or"
        require(self.offline or os.environ.get(KEY_VARIABLE), f"{problem} offline = true")
        Path(self.cache).mkdir(parents=True, exist_ok=True)

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Returns the best documents, best first: title, address, score, text."""
        usd = seconds = 0.0
        note, texts = "", {}
        try:
            query = arguments["query"].strip()[:QUERY_CHARS]
            body = {"query": query, "search_depth": "advanced", "max_results": 20}
            hits, seconds = self._ask("search", body | {"chunks_per_source": 3})
            usd += self.usd_per_search
            hits = sorted(hits, key=lambda hit: -hit.get("score", 0.0))[: self.pages]
        except _SearchError as error:
            return ToolResult(f"Error: {self.name}: {error}", usd, seconds, error=True)
        try:
            urls = [hit["url"] for hit in hits]
            body = {"urls": urls, "extract_depth": "advanced", "format": "text"}
            pages, more = self._ask("extract", body) if urls else ([], 0.0)
            texts = {page["url"]: page.get("raw_content") or "" for page in pages}
            usd, seconds = usd + self.usd_per_page * len(pages), seconds + more
        except _SearchError as error:
            note = f"\n\n(excerpts only; pages were not read: {error})"
        documents = []
        for hit in hits:
            text = texts.get(hit["url"], "")
            text = text if len(text) > MIN_CHARS else hit.get("content") or text
            head = f"{hit.get('title') or ''}\n{hit['url']} (score {hit.get('score', 0.0):.2f})"
            documents.append(f"{head}\n{text[:PAGE_CHARS]}")
        content = "\n\n".join(documents) + note if documents else "nothing found"
        return ToolResult(content, usd, seconds, found={"documents": documents[::-1]})

    def _ask(self, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], float]:
        """Returns the results of a request and its seconds, from the cache if they are there."""
        digest = hashlib.sha256(json.dumps([path, body], sort_keys=True).encode()).hexdigest()
        stored = Path(self.cache) / f"{digest}.json"
        try:
            return read_json(stored)
        except UserError:  # not asked yet, or damaged
            pass
        if self.offline:
            raise _SearchError("offline, and this query has no stored reply; use another tool")
        start = time.monotonic()
        try:
            results = within(self.timeout_s, partial(self._post, path, body))
        except TimeoutError:
            raise _SearchError(f"no reply within {self.timeout_s:g} s") from None
        answer = results, time.monotonic() - start
        try:
            write_whole(stored, json.dumps(answer))
        except UserError as error:
            warnings.warn(f"a reply of Tavily is lost: {error}", stacklevel=2)
        return answer

    def _post(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the results of one request, which is repeated twice at most."""
        headers = {"Authorization": f"Bearer {os.environ.get(KEY_VARIABLE, '').strip()}"}
        with requests.Session() as session:
            session.mount(self.base_url, HTTPAdapter(max_retries=_AGAIN))
            try:
                reply = session.post(
                    f"{self.base_url}/{path}", json=body, headers=headers, timeout=self.timeout_s
                )
                reply.raise_for_status()
                _REPLY.validate(found := reply.json())
            except (requests.RequestException, ValueError, ValidationError) as error:
                problem = " ".join(f"{type(error).__name__}: {error}".split())
                raise _SearchError(problem[:200]) from None
        return found["results"]
