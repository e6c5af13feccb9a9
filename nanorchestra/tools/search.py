"""Searches the web by Tavily, reads the best pages, and keeps every reply on disk.

A stored reply keeps its price and latency, so that a run repeats itself. Offline, only stored
replies are read. The API key comes from the environment and reaches no message and no file.
"""

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, write_whole
from nanorchestra.records import RESULT_WORDS, ToolResult
from nanorchestra.schemas import SHAPES, Json, arguments_schema
from nanorchestra.tools.http import EndpointError, post
from nanorchestra.tools.spending import Spending, reply_file

TAVILY = "https://api.tavily.com"
KEY_VARIABLE = "TAVILY_API_KEY"
QUERY_CHARS = 400  # Tavily's limit
PAGE_CHARS = 10_000  # of a document; a page is cut there
MIN_CHARS = 100  # of a page; a shorter one is replaced by the excerpts of the search


@dataclass
class WebSearch:
    """Documents of the web for a query. `cache` is a directory; prices are Tavily's, in USD.

    `base_url` is the address of Tavily, or of a server that answers as Tavily does. UserError
    without a key, unless `offline`.
    """

    name: str
    description: str
    cache: str
    pages: int = 5
    offline: bool = False
    usd_per_search: float = 0.01
    usd_per_page: float = 0.002
    timeout_s: float = 60.0
    base_url: str = TAVILY
    spending: Spending = field(default_factory=Spending)
    result_words: int = RESULT_WORDS
    kind, blocking = "search", True
    parameters = arguments_schema(query="string")

    def __post_init__(self) -> None:
        problem = f"{self.name}: the environment variable {KEY_VARIABLE} is not set; set it, or"
        require(self.offline or os.environ.get(KEY_VARIABLE), f"{problem} offline = true")
        try:
            Path(self.cache).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            problem = f"{self.name}: cache is {self.cache!r:.80}, no directory that can be made"
            raise UserError(f"{problem} ({reason})") from None

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which searches of the web can be banned."""
        return {"web", "web search"}

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of a search whose pages are all read."""
        return self.usd_per_search + self.usd_per_page * self.pages

    def call(self, arguments: Json) -> ToolResult:
        """Returns the best documents, best first: title, address, score, text."""
        query = arguments["query"].strip()[:QUERY_CHARS]
        most = self.most_usd(arguments)
        return self.spending.charge(self.name, most, lambda: self._search(query))

    def _search(self, query) -> ToolResult:
        body = {"query": query, "search_depth": "advanced", "max_results": 20}
        try:
            hits, seconds = self._ask("search", body | {"chunks_per_source": 3})
        except EndpointError as error:
            retries, seconds = error.spent
            return ToolResult(
                f"Error: {self.name}: {error}",
                latency_s=seconds,
                error=True,
                infrastructure=not error.bad_request,
                retries=retries,
            )
        hits = hits[: self.pages]  # best first
        if not hits:
            return ToolResult("nothing found", self.usd_per_search, seconds)
        body = {"urls": [h["url"] for h in hits], "extract_depth": "advanced", "format": "text"}
        note = ""
        try:
            pages, more = self._ask("extract", body)
        except EndpointError as error:
            pages, more = [], error.spent[1]
            note = f"\n\n(excerpts only; pages were not read: {error})"
        pages = pages[: len(hits)]  # a server that sends more than was asked for is not paid more
        texts = {page["url"]: page.get("raw_content") or "" for page in pages}
        documents = []
        for hit in hits:
            text = texts.get(hit["url"], "")
            text = text if len(text) > MIN_CHARS else hit.get("content") or text
            score = hit.get("score") or 0.0
            head = f"{hit.get('title') or ''}\n{hit['url']} (score {score:.2f})"
            documents.append(f"{head}\n{text[:PAGE_CHARS]}")
        usd = self.usd_per_search + self.usd_per_page * len(pages)
        content = "\n\n".join(documents) + note
        best_last = {"documents": documents[::-1]}
        return ToolResult(content, usd, seconds + more, findings=best_last)

    def _ask(self, path, body) -> tuple[list[Json], float]:
        """Returns the results of a request and its seconds, from the cache if they are there."""
        url = f"{self.base_url.rstrip('/')}/{path}"
        request = [path, body] if self.base_url == TAVILY else [url, body]
        stored = reply_file(self.cache, request)
        try:
            return read_json(stored)
        except UserError as missing:  # not asked yet, or damaged
            if self.offline:
                problem = "offline, and this query has no stored reply; use another tool"
                raise EndpointError(problem, bad_request=True) from missing
        reply, (_, seconds) = post(url, body, SHAPES["tavily"], KEY_VARIABLE, self.timeout_s)
        answer = reply["results"], seconds
        try:
            write_whole(stored, json.dumps(answer))
        except UserError as error:
            warnings.warn(f"a reply of Tavily is lost: {error}", stacklevel=2)
        return answer
