"""A conversation on the engine: an append-only sequence of ids whose KV stays between its turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanorchestra.engine.cache import PageTable
from nanorchestra.engine.request import Completion, OnToken, Request, SamplingParams
from nanorchestra.errors import require

if TYPE_CHECKING:
    from nanorchestra.engine.engine import Engine


class Session:
    """One conversation. A turn computes only what has been appended since the last one.

    When pages run out, the engine may take those of a session that waits for a tool. Its next turn
    then computes them anew.
    """

    def __init__(self, engine: Engine, ids: Sequence[int] = ()):
        self._engine, self._ids = engine, engine.limits.check_ids(ids)
        self._table = PageTable(kept=True)
        self._request: Request | None = None
        self._closed = False

    @property
    def ids(self) -> list[int]:
        """All ids so far, given and sampled. Those of an open turn are added when it finishes."""
        if self._request is not None and self._request.finished:
            self._ids, self._request = self._request.ids, None
        return self._ids

    def append(self, ids: Sequence[int]) -> None:
        """Adds given ids: a tool's result, a user's message. Raises UserError during a turn."""
        self._settled().extend(self._engine.limits.check_ids(ids))

    def submit(self, params: SamplingParams, on_token: OnToken | None = None) -> Request:
        """Starts a turn. Its sampled ids are part of `ids` once it has finished.

        Raises UserError as Engine.submit does, or if a turn is open.
        """
        request = self._engine.make_request(self._settled(), params, on_token, self._table)
        self._engine.scheduler.add(request)
        self._request = request
        return request

    def sample(self, params: SamplingParams) -> Completion:
        """Runs one turn to its end. Other requests go on meanwhile."""
        request = self.submit(params)
        while not request.finished:
            self._engine.step()
        return request.completed()

    def close(self) -> Completion | None:
        """Gives the pages back. Aborts an open turn and returns it. The ids stay readable."""
        self._closed, request = True, self._request
        is_open = request is not None and not request.finished
        if is_open:
            self._engine.abort(request)
        self._engine.scheduler.close(self._table)
        return request.completion if is_open else None

    def _settled(self) -> list[int]:
        ids = self.ids
        require(not self._closed, "session: it is closed; open a new one")
        require(not self._request, "session: a turn is being sampled; wait for it, or abort it")
        return ids
