"""Decides what each step computes: admission, preemption, and the release of pages. No torch.

Every step first decodes all running requests of which only the last id has no KV, and spends the
rest of `max_batch_tokens` on prefill, in chunks. Admission is optimistic: a request is admitted
when its present tokens fit, whatever its max_tokens. When pages run out, the newest sequence loses
its pages, whether it runs or waits for a tool. It is computed again later, mostly from indexed
pages.

A prefix that prompts share is prefilled once. A request waits while a running prefill is about to
write its next full page, then takes the indexed pages and computes what is left.
"""

import bisect
from dataclasses import dataclass, field

from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.sequence import Request, Sequence


@dataclass
class Chunk:
    """Part of a prefill: ids[start:end] of a request, which one step computes."""

    request: Request
    start: int
    end: int
    is_last: bool  # the prefill ends with it, so that a token is sampled

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.end - self.start


@dataclass
class Batch:
    """What one step computes: one token of each request in `decodes`, then the chunks.

    `failed` has the errors of requests that could not be admitted.
    """

    decodes: list[Request] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)
    failed: dict[Request, Exception] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """True if there is nothing to compute."""
        return not (self.decodes or self.prefills)

    @property
    def sampled(self) -> list[Request]:
        """Requests that get a token: the decodes, then those whose prefill ends in this step."""
        return self.decodes + self.ended_prefills

    @property
    def ended_prefills(self) -> list[Request]:
        """Requests whose prefill ends in this step."""
        return [chunk.request for chunk in self.prefills if chunk.is_last]

    @property
    def prefill_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum(chunk.count for chunk in self.prefills)


class Scheduler:
    """Schedules the steps. A request is waiting, running, or finished and in neither queue.

    Invariant (tests/invariants.py): `running` is in order of arrival, the oldest first, and
    `waiting` in order of admission. `parked` has the sequence of each session between turns. A
    waiting request holds no pages but those of a parked session.

    max_running: requests that run at a time, no more than max_batch_tokens.
    """

    def __init__(self, blocks: BlockManager, max_batch_tokens: int, max_running: int):
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.parked: set[Sequence] = set()
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queues a request: those that resume a session first, then in order of arrival."""
        if request.sequence.arrival < 0:
            request.sequence.arrival = request.id
        bisect.insort(self.waiting, request, key=_admission_order)

    def schedule(self) -> Batch:
        """Returns the next step and takes its pages. Nothing counts as computed before `commit`."""
        batch = Batch()
        self._schedule_decodes(batch)
        self._schedule_prefills(batch)
        return batch

    def schedule_ahead(self) -> Batch | None:
        """Returns the step after one that has been committed, and whose tokens are unknown.

        It has the chunks and admissions that `schedule` would give. A request may have ended with
        the token that is not known yet; its row is then ignored. None if the pages do not suffice
        for all decodes: a preemption needs the tokens, which must be read first.
        """
        lengths = {}  # of the requests that decode, the unknown token counted
        for request in self.running:
            length = len(request.ids) + (request.uncomputed == 0)
            if request.uncomputed == 1 or (request.uncomputed == 0 and length < request.limit):
                lengths[request] = length
        missing = sum(self.blocks.missing(r.sequence, length) for r, length in lengths.items())
        if missing > self.blocks.available:
            return None
        for request, length in lengths.items():
            self.blocks.grow(request.sequence, length)
        batch = Batch(decodes=list(lengths))
        self._schedule_prefills(batch)
        return batch

    def commit(self, batch: Batch) -> None:
        """Records that the step has been computed, or is in front of all later ones on the device.

        Call it before its tokens are accepted.
        """
        for request in batch.decodes:
            self.blocks.commit(request.sequence, len(request.ids))
        for chunk in batch.prefills:
            self.blocks.commit(chunk.request.sequence, chunk.end)

    def finish(self, request: Request) -> None:
        """Takes out a request that stopped, was aborted, or failed. A session keeps its pages."""
        self._take_out(request, keep_pages=request.sequence.is_session)

    def free(self, sequence: Sequence) -> None:
        """Takes the pages of a sequence that none samples on, or of a session: they become idle."""
        self.parked.discard(sequence)
        self.blocks.release(sequence)

    def reset(self) -> None:
        """Empties the cache: running requests and sessions will compute their KV anew."""
        for request in list(self.running):
            self._requeue(request)
        for sequence in list(self.parked):
            self.free(sequence)
        for request in self.waiting:  # an interrupted admission may have left pages
            self.blocks.release(request.sequence)
        self.blocks.clear()

    # Running requests.

    def _schedule_decodes(self, batch):
        """Adds all requests that decode, oldest first; preempts the newest where pages run out."""
        position = 0
        while position < len(self.running):
            request = self.running[position]
            if request.is_decoding:
                if not self._make_room(request):
                    continue  # it was the newest and has been preempted itself
                batch.decodes.append(request)
            position += 1

    def _make_room(self, request) -> bool:
        """Takes a page for one more token of a running request, from the newest if none is free.

        Returns False if `request` was the newest and has been preempted.
        """
        while not self.blocks.grow(request.sequence, len(request.ids)):
            newest = self.running[-1]
            if self._revoke_parked(newer_than=newest.sequence.arrival):
                continue
            self.preemptions += 1
            self._requeue(newest)
            if newest is request:
                return False
        return True

    def _revoke_parked(self, newer_than) -> bool:
        """Takes the newest parked session's pages. False if none came after that arrival."""
        sequence = max(self.parked, key=lambda parked: parked.arrival, default=None)
        if sequence is None or sequence.arrival <= newer_than:
            return False
        self.free(sequence)
        return True

    # Prefill and admission.

    def _schedule_prefills(self, batch):
        """Adds chunks of running requests, then of waiting ones, up to max_batch_tokens."""
        budget = self.max_batch_tokens - len(batch.decodes)
        for request in self.running:
            if request.uncomputed > 1 and budget > 0:
                budget -= self._add_chunk(batch, request, budget)
        self._admit_waiting(batch, budget)

    def _add_chunk(self, batch, request, budget) -> int:
        """Adds the next chunk of a prefill, and returns how many tokens it has."""
        start = request.sequence.num_computed
        count = min(request.uncomputed, budget)
        is_last = (start + count) == len(request.ids)
        batch.prefills.append(Chunk(request, start, start + count, is_last))
        return count

    def _admit_waiting(self, batch, budget):
        """Admits requests in order, until one has to wait for rows, tokens or pages.

        budget: tokens that are left for prefill.
        """
        if not self.waiting:
            return
        coming_pages = set()  # keys of the full pages that running prefills write next
        for request in self.running:
            if request.uncomputed > 1:
                coming_pages.add(self.blocks.next_key(request.sequence, len(request.ids)))
        for request in list(self.waiting):
            if len(self.running) >= self.max_running:
                return
            if budget <= 0:
                return
            sequence, length = request.sequence, len(request.ids)
            try:
                if not sequence.block_table:  # a session comes with its own pages
                    self.blocks.match(sequence)
                next_page = self.blocks.next_key(sequence, length - 1)  # None: it is not full
                if next_page and next_page in coming_pages and not request.resumes:
                    self.blocks.release(sequence)
                    continue
                if not self._take_pages(request):
                    return
            except Exception as error:  # a fault of one request's must not stop the others
                batch.failed[request] = error
                continue
            self._start(request)
            if request.is_decoding:  # its prompt is cached, or one id long
                batch.decodes.append(request)
                budget -= 1
            else:
                coming_pages.add(self.blocks.next_key(sequence, length))
                budget -= self._add_chunk(batch, request, budget)

    def _take_pages(self, request) -> bool:
        """Takes pages for all present tokens, and leaves one for each running request.

        Returns False if there are too few. The request then waits on, and keeps the pages of its
        session.
        """
        sequence, length = request.sequence, len(request.ids)
        self.parked.discard(sequence)  # its own pages do not give way
        if self._make_available(
            self.blocks.missing(sequence, length) + len(self.running), sequence
        ):
            return self.blocks.grow(sequence, length)
        if request.resumes and sequence.block_table:
            self.parked.add(sequence)
        else:
            self.blocks.release(sequence)
        return False

    def _make_available(self, num_pages, sequence) -> bool:
        """Takes pages of parked sessions that came after the sequence, until so many are available.

        If no request runs, those that came before it give way too: every request is served in the
        end.
        """
        newer_than = sequence.arrival if self.running else -1
        while self.blocks.available < num_pages:
            if not self._revoke_parked(newer_than):
                return False
        return True

    def _start(self, request):
        """Moves a request that has its pages to the running ones."""
        self.waiting.remove(request)
        bisect.insort(self.running, request, key=_arrival)
        if request.cached_tokens is None:
            request.cached_tokens = request.sequence.num_computed

    # Release.

    def _requeue(self, request):
        self._take_out(request, keep_pages=False)
        self.add(request)

    def _take_out(self, request, keep_pages):
        """Takes a request out of its queue: for finish, abort, preemption and error alike.

        It leaves the queue last, so what an interrupt leaves undone can be done again.
        """
        if keep_pages:
            self.parked.add(request.sequence)
        else:
            self.free(request.sequence)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)


def _arrival(request) -> int:
    return request.sequence.arrival


def _admission_order(request) -> tuple[bool, int]:
    return not request.resumes, request.sequence.arrival
