"""Searches the web by Tavily, which reads the best pages in the same request.

All equal queries of a recording have the same reply, as nothing is sampled. The API key comes from
the environment and reaches no message and no file.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Required

from typing_extensions import TypedDict

from nanorchestra.agent.tool import Tool
from nanorchestra.errors import require
from nanorchestra.records import ToolResult
from nanorchestra.schemas import Json, arguments_schema
from nanorchestra.tools.http import Reply, post
from nanorchestra.tools.spending import Charge, Spending, UnpaidError

TAVILY = "https://api.tavily.com"
KEY_VARIABLE = "TAVILY_API_KEY"
QUERY = "A few words to search for."
QUERY_CHARS = 400  # Tavily's limit
PAGE_CHARS = 10_000  # of a document; a page is cut there
MIN_CHARS = 100  # of a page; a shorter one is replaced by the excerpts of the search


class Page(TypedDict, total=False):
    """A result: excerpts of a page, and all of its text where that was read."""

    url: Required[str]
    title: str | None
    content: str | None
    raw_content: str | None
    score: float | None


class Results(TypedDict):
    """What Tavily answers to /search, as far as it is read here."""

    results: list[Page]


@dataclass
class WebSearch(Tool):
    """Documents of the web for a query. The price is that of an advanced search, 2 credits.

    `base_url` is the address of Tavily, or of a server that answers as Tavily does. UserError
    without a key, but in a replay, which asks nothing.
    """

    name: str
    description: str
    pages: int = 5
    usd_per_call: float = 0.016
    timeout_s: float = 60.0
    base_url: str = TAVILY
    spending: Spending = field(default_factory=Spending)
    kind, blocking = "search", True
    parameters = arguments_schema({"query": QUERY}, query="string")

    def __post_init__(self) -> None:
        problem = f"{self.name}: the environment variable {KEY_VARIABLE} is not set"
        require(not self.spending.replies.asks or os.environ.get(KEY_VARIABLE), problem)

    def ban_names(self, arguments: Json | None = None) -> set[str]:
        """Returns the names under which searches of the web can be banned."""
        return super().ban_names(arguments) | {"web", "web search"}

    def call(self, arguments: Json) -> ToolResult:
        """Returns the best documents, best first: title, address, score, text."""
        found = self._found(arguments["query"].strip()[:QUERY_CHARS])
        documents = [_document(hit) for hit in (found.content or [])[: self.pages]]
        text = "\n\n".join(documents) or "nothing found"
        return ToolResult(
            f"Error: {self.name}: {found.problem}" if found.problem else text,
            self._price_of(found),
            found.seconds,
            error=bool(found.problem),
            infrastructure=found.infrastructure,
            retries=found.retries,
            findings={"documents": documents[::-1]} if documents else {},
            waited_s=found.waited,
        )

    def _price_of(self, found: Reply) -> float:
        return self.usd_per_call if found.worked else 0.0

    def _found(self, query: str) -> Reply:
        """Returns the reply to a query, with its results as content."""
        url = f"{self.base_url.rstrip('/')}/search"
        body = {"query": query, "search_depth": "advanced", "chunks_per_source": 3}
        body |= {"max_results": self.pages, "include_raw_content": "text"}

        charge = Charge(self.name, self.usd_per_call, self._price_of)

        def ask() -> Reply:
            with self.spending.reserved(charge) as bill:
                reply = post(url, body, Results, KEY_VARIABLE, self.timeout_s)
                bill.usd = charge.price_of(reply)
            return reply if reply.problem else replace(reply, content=reply.content["results"])

        request = {"url": url, "body": body}
        try:
            return self.spending.replies.get(request, ask, self.timeout_s, shared=True)
        except UnpaidError as error:
            return Reply(problem=str(error))


def _document(hit) -> str:
    """Returns a result as a document: its page, or the excerpts where that was not read."""
    page = hit.get("raw_content") or ""
    text = page if len(page) > MIN_CHARS else hit.get("content") or page
    head = f"{hit.get('title') or ''}\n{hit['url']} (score {hit.get('score') or 0.0:.2f})"
    return f"{head}\n{text[:PAGE_CHARS]}"
