"""A conversation on the engine: an append-only sequence of ids whose KV stays between its turns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanorchestra.engine.sequence import Completion, OnToken, Request, SamplingParams, Sequence
from nanorchestra.errors import require

if TYPE_CHECKING:
    from nanorchestra.engine.engine import Engine


class Session:
    """One conversation. A turn computes only what has been appended since the last one.

    When pages run out, the engine may take those of a session that waits for a tool. Its next turn
    then computes them anew.
    """

    def __init__(self, engine: Engine, ids: Iterable[int]):
        self._engine = engine
        self._sequence = Sequence(engine.limits.check_ids(ids), is_session=True)
        self._turn: Request | None = None  # the turn that is being sampled
        self._closed = False

    @property
    def ids(self) -> list[int]:
        """All ids so far, given and sampled. Those of an open turn are added when it finishes."""
        if self._open_turn() is not None:
            return self._sequence.ids[: self._turn.prompt_tokens]
        return list(self._sequence.ids)

    def append(self, ids: Iterable[int]) -> None:
        """Adds given ids: a tool's result, a user's message. Raises UserError during a turn."""
        self._require_settled()
        self._sequence.ids.extend(self._engine.limits.check_ids(ids))

    def submit(self, params: SamplingParams, on_token: OnToken | None = None) -> Request:
        """Starts a turn. Its sampled ids are part of `ids` once it has finished.

        Raises UserError as Engine.submit does, or if a turn is open.
        """
        self._require_settled()
        turn = self._engine.make_request_on(self._sequence, params, on_token)
        self._engine.scheduler.add(turn)
        self._turn = turn
        return turn

    def sample(self, params: SamplingParams) -> Completion:
        """Runs one turn to its end. Other requests go on meanwhile."""
        turn = self.submit(params)
        while not turn.finished:
            self._engine.step()
        return turn.completed()

    def close(self) -> Completion | None:
        """Gives the pages back. Aborts an open turn and returns it. The ids stay readable."""
        self._closed = True
        turn = self._open_turn()
        if turn is not None:
            self._engine.abort(turn)
        self._engine.scheduler.free(self._sequence)
        return None if turn is None else turn.completion

    def _open_turn(self) -> Request | None:
        """Returns the turn that is being sampled, if there is one."""
        if self._turn is not None and self._turn.finished:
            self._turn = None
        return self._turn

    def _require_settled(self):
        require(not self._closed, "session: it is closed; open a new one")
        is_open = self._open_turn() is not None
        require(not is_open, "session: a turn is being sampled; wait for it, or abort it")
