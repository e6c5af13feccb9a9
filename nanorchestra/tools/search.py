"""Searches the web by Tavily, and reads the best pages.

A reply that is recorded keeps its price and latency, so that a run repeats itself. All equal
queries have the same reply, as nothing is sampled. The API key comes from the environment and
reaches no message and no file.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from nanorchestra.errors import UserError, require
from nanorchestra.records import RESULT_WORDS, ToolResult
from nanorchestra.schemas import SHAPES, Json, arguments_schema
from nanorchestra.tools.http import post
from nanorchestra.tools.limits import Tool
from nanorchestra.tools.replies import ReplayError, Reply, ReplyStore
from nanorchestra.tools.spending import Spending

TAVILY = "https://api.tavily.com"
KEY_VARIABLE = "TAVILY_API_KEY"
QUERY_CHARS = 400  # Tavily's limit
PAGE_CHARS = 10_000  # of a document; a page is cut there
MIN_CHARS = 100  # of a page; a shorter one is replaced by the excerpts of the search


@dataclass
class WebSearch(Tool):
    """Documents of the web for a query. Prices are Tavily's, in USD.

    `cache` is a directory of recorded replies of this tool alone, beside those of the run; ""
    none. `offline`: nothing but its replies is read. `base_url` is the address of Tavily, or of a
    server that answers as Tavily does. UserError without a key, unless nothing is asked.
    """

    name: str
    description: str
    cache: str = ""
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
        require(self.cache or not self.offline, f"{self.name}: offline needs a cache to read")
        replies = self.spending.replies
        asks = not self.offline and (replies is None or replies.asks)
        problem = f"{self.name}: the environment variable {KEY_VARIABLE} is not set; set it, or"
        require(not asks or os.environ.get(KEY_VARIABLE), f"{problem} offline = true")
        try:
            self._cached = ReplyStore(self.cache, not self.offline).make() if self.cache else None
        except UserError as error:
            raise UserError(f"{self.name}: cache is {error}") from None

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which searches of the web can be banned."""
        return super().ban_names(arguments) | {"web", "web search"}

    @property
    def prices(self) -> dict[str, float]:
        """The US dollars of a search, and of a page that is read."""
        return {"search": self.usd_per_search, "page": self.usd_per_page}

    def most_usd(self, arguments: Json) -> float:
        """Returns the US dollars of a search whose pages are all read."""
        return self.usd_per_search + self.usd_per_page * self.pages

    def call(self, arguments: Json) -> ToolResult:
        """Returns the best documents, best first: title, address, score, text."""
        query = arguments["query"].strip()[:QUERY_CHARS]
        body = {"query": query, "search_depth": "advanced", "max_results": 20}
        body["chunks_per_source"] = 3
        most = self.most_usd(arguments)  # its pages are to be paid, too

        def found_usd(found: Reply) -> float:
            return self.usd_per_search if found.begun else 0.0

        found = self._ask("search", body, most, found_usd)
        seconds = found.seconds
        if found.problem:
            return ToolResult(
                f"Error: {self.name}: {found.problem}",
                found_usd(found),
                latency_s=seconds,
                error=True,
                infrastructure=not found.bad_request,
                retries=found.retries,
                waited_s=found.waited,
            )
        hits = found.content
        hits = hits[: self.pages]  # best first
        if not hits:
            return ToolResult("nothing found", self.usd_per_search, seconds)
        body = {"urls": [h["url"] for h in hits], "extract_depth": "advanced", "format": "text"}

        def read_usd(read: Reply) -> float:
            """Returns the price of the pages that came, or of all where that cannot be read."""
            came = len(hits) if read.problem else len(read.content)
            return self.usd_per_page * min(came, len(hits)) if read.begun else 0.0

        read = self._ask("extract", body, self.usd_per_page * len(hits), read_usd)
        note = f"\n\n(excerpts only; pages were not read: {read.problem})" if read.problem else ""
        pages = (read.content or [])[: len(hits)]
        texts = {page["url"]: page.get("raw_content") or "" for page in pages}
        documents = []
        for hit in hits:
            text = texts.get(hit["url"], "")
            text = text if len(text) > MIN_CHARS else hit.get("content") or text
            score = hit.get("score") or 0.0
            head = f"{hit.get('title') or ''}\n{hit['url']} (score {score:.2f})"
            documents.append(f"{head}\n{text[:PAGE_CHARS]}")
        usd = self.usd_per_search + read_usd(read)
        content = "\n\n".join(documents) + note
        best_last = {"documents": documents[::-1]}
        return ToolResult(
            content,
            usd,
            seconds + read.seconds,
            retries=found.retries + read.retries,
            findings=best_last,
            waited_s=found.waited + read.waited,
        )

    def _ask(self, path: str, body: Json, most_usd: float, bill: Callable[[Reply], float]) -> Reply:
        """Returns the reply to a request, with its results as content; it costs `bill(reply)`."""
        url = f"{self.base_url.rstrip('/')}/{path}"
        request = {"url": url, "body": body}

        def ask() -> Reply:
            reply, spent = post(url, body, SHAPES["tavily"], KEY_VARIABLE, self.timeout_s)
            return Reply(reply["results"], (0, 0), *spent)

        def paid() -> Reply:
            return self.spending.pay(ask, most_usd, bill, self.name)

        def cached() -> Reply:
            if self._cached is None:
                return paid()
            try:
                return self._cached.reply(request, paid, self.timeout_s, shared=True)
            except ReplayError as error:
                missing = "offline, and this query has no stored reply; use another tool"
                problem = missing if self.offline else str(error)
                return Reply(problem=problem, bad_request=self.offline)

        return self.spending.recorded(request, cached, self.timeout_s, shared=True)
