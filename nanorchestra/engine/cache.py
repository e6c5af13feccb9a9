"""The book-keeping of the paged KV cache: which page holds which tokens, for whom, and which pages may be shared. No torch, no KV data.

A page holds the keys and values of `page_size` consecutive positions of one sequence. A full page whose KV has been written by a
completed step is indexed under (uid of the page before it, its own tokens); the first page's parent is a root that stands for the
weight version. Uids are never reused, so a key names the whole prefix exactly: nothing is hashed away and nothing can collide, and
pages written under older weights can never match. A page that nobody holds stays indexed ("idle") until its place is needed.

A sequence can be forked: both then hold the same pages, the last one too, which may be half full. Whoever is about to write into a page
that others hold as well gets a copy of it (`grow`); the copies to be made are listed in `copies` until somebody makes them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Iterable, Sequence

Key = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class PageTable:
    """One sequence's pages in order. The first `written` positions have their KV; the first `committed` pages are in the index."""

    pages: list[int] = field(default_factory=list)
    written: int = 0
    committed: int = 0
    parent: int = 0  # uid of the last committed page, or the root
    root: int = 0  # of the weights that its first page was computed by


class PageCache:
    """Reference-counted pages with exact prefix sharing.

    Invariant (see `check`): every page is exactly one of free, idle (indexed, held by nobody) or held; the references of a page are
    the tables it stands in; the pages before an indexed page are indexed too and leave the index no sooner than it does; a page that
    several tables hold is indexed, or is half full and stands in forks at the same place.
    """

    def __init__(self, num_pages: int, page_size: int = 16):
        self.num_pages, self.page_size, self.version = num_pages, page_size, 0
        self.root = (
            -1
        )  # stands before the first page; no uid equals it, and each version has its own
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_pages
        self._uids = [0] * num_pages  # 0: not indexed
        self._keys: list[Key | None] = [None] * num_pages
        self._index: dict[Key, int] = {}
        self._last_uid, self._last_root = 0, self.root
        self.copies: dict[
            int, int
        ] = {}  # page -> the page whose KV it is to be given, before the next step

    @property
    def available(self) -> int:
        """Pages that can be handed out now: the free ones and the idle ones."""
        return len(self._free) + len(self._idle)

    def pages_for(self, length: int) -> int:
        """How many pages `length` positions take."""
        return -(-length // self.page_size)

    def match(self, table: PageTable, ids: Sequence[int]) -> int:
        """Fills the empty `table` with the longest indexed prefix of `ids`; returns its length in tokens, at most len(ids) - 1.

        The last token is left out even if its page is known, because its logits still have to be computed.
        """
        if table.pages:
            raise ValueError("match needs an empty table")
        table.parent = table.root = self.root
        for start in range(0, len(ids) - self.page_size, self.page_size):
            page = self._index.get((table.parent, tuple(ids[start : start + self.page_size])))
            if page is None:
                break
            if self._refs[page] == 0:
                del self._idle[page]
            self._refs[page] += 1
            table.pages.append(page)
            table.parent = self._uids[page]
        table.committed = len(table.pages)
        table.written = table.committed * self.page_size
        return table.written

    def next_key(self, table: PageTable, ids: Sequence[int]) -> Key | None:
        """The key under which the page after the committed ones will be indexed, or None if `ids` do not fill that page."""
        start = table.committed * self.page_size
        tokens = tuple(ids[start : start + self.page_size])
        return (table.parent, tokens) if len(tokens) == self.page_size else None

    def writable(self, table: PageTable, length: int) -> bool:
        """Whether the positions from `table.written` up to `length` have room in pages that nobody else holds."""
        first = table.written // self.page_size
        return length <= len(table.pages) * self.page_size and (
            first == len(table.pages) or self._refs[table.pages[first]] == 1
        )

    def missing(self, table: PageTable, length: int) -> int:
        """How many free pages `table` needs before positions up to `length` can be written: new ones, and a copy of a shared last one."""
        first = table.written // self.page_size
        shared = first < len(table.pages) and self._refs[table.pages[first]] > 1
        return max(0, self.pages_for(length) - len(table.pages)) + shared

    def grow(self, table: PageTable, length: int) -> bool:
        """Makes positions up to `length` writable, evicting idle pages if it must. False, and nothing changed, if there are too few."""
        if self.missing(table, length) > self.available:
            return False
        if not table.pages:
            table.parent = table.root = self.root
        first = table.written // self.page_size
        if not self.writable(table, min(length, len(table.pages) * self.page_size)):
            source = table.pages[first]
            table.pages[first] = page = self._take()
            self._refs[source] -= 1
            self.copies[page] = self.copies.get(
                source, source
            )  # a source that awaits its own copy has nothing yet
        while len(table.pages) < self.pages_for(length):
            table.pages.append(self._take())
        return True

    def fork(self, table: PageTable, other: PageTable, length: int) -> None:
        """Fills the empty `other` with the pages of the first `length` positions of `table`: written ones, or about to be."""
        if other.pages:
            raise ValueError("fork needs an empty table")
        other.pages[:] = table.pages[: self.pages_for(length)]
        for page in other.pages:
            self._refs[page] += 1
        other.written, other.committed, other.parent, other.root = (
            table.written,
            table.committed,
            table.parent,
            table.root,
        )

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._refs[page] = 1
        return page

    def commit(self, table: PageTable, ids: Sequence[int], written: int) -> None:
        """Records that the KV of ids[:written] now stands in the table's pages, and indexes the pages this completes.

        If another sequence has indexed the same page meanwhile, the table takes that one and gives its own copy back: the KV is equal,
        and from then on both read one page.
        """
        if not table.written <= written <= len(table.pages) * self.page_size:
            raise ValueError(
                f"cannot commit {written} positions: {table.written} were written, {len(table.pages)} pages are held"
            )
        table.written = written
        while (table.committed + 1) * self.page_size <= written:
            key = self.next_key(table, ids)
            page = table.pages[table.committed]
            known = self._index.get(key)
            if known is None:
                self._last_uid += 1
                self._index[key], self._keys[page], self._uids[page] = page, key, self._last_uid
            else:
                if self._refs[known] == 0:
                    del self._idle[known]
                self._refs[known] += 1
                table.pages[table.committed] = known
                self._drop(page)
            table.parent = self._uids[table.pages[table.committed]]
            table.committed += 1

    def release(self, table: PageTable) -> None:
        """Gives all pages back and empties the table. The last page goes first, so that a prefix is evicted from its end."""
        for page in reversed(table.pages):
            self._drop(page)
        table.pages.clear()
        table.written = table.committed = 0
        table.parent = self.root

    def set_version(self, version: int) -> None:
        """The weights have changed: idle pages are freed at once, and no page written so far will ever match again. Free pages are handed out from
        the lowest on, as at first: rows are batched in the order of their pages, and sums are rounded in the order of the rows."""
        self.version = version
        self._last_root -= 1
        self.root = self._last_root
        while self._idle:
            self._free.append(self._evict())
        self._free.sort(reverse=True)

    def detach(self, table: PageTable) -> None:
        """The KV that `table` writes from now on is its own: computed by other weights than what stands before, it matches nobody's."""
        if table.pages:
            self._last_root -= 1
            table.parent = self._last_root

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if self._refs[page] == 0:
            if self._uids[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._index[self._keys[page]]
        self._keys[page], self._uids[page] = None, 0
        return page

    def check(self, tables: Iterable[PageTable]) -> None:
        """Walks over every invariant, given all live tables; AssertionError names the first that is broken."""
        tables = list(tables)
        held = Counter(page for table in tables for page in table.pages)
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert len(free) + len(idle) + len(held) == self.num_pages, (
            "pages are lost, or counted twice"
        )
        assert not free & idle and not free & held.keys() and not idle & held.keys(), (
            "a page is in two states"
        )
        assert all(held[page] == self._refs[page] for page in range(self.num_pages)), (
            "references differ from the tables"
        )
        assert all(self._uids[page] and self._index[self._keys[page]] == page for page in idle), (
            "an idle page is not indexed"
        )
        assert all(self._uids[page] == 0 and self._keys[page] is None for page in free), (
            "a free page is indexed"
        )
        assert sorted(self._index.values()) == [
            page for page in range(self.num_pages) if self._uids[page]
        ], "index and uids differ"
        assert len({uid for uid in self._uids if uid}) == len(self._index), "two pages have one uid"
        uids = {self._uids[page] for page in self._index.values()}
        assert all(parent < 0 or parent in uids for parent, _ in self._index), (
            "an indexed page has lost its parent"
        )
        for table in tables:
            assert (
                table.committed * self.page_size
                <= table.written
                <= len(table.pages) * self.page_size
            ), "a table's counts are out of order"
            parent = None
            for page in table.pages[: table.committed]:
                assert self._uids[page], "a committed page is not indexed"
                assert self._keys[page][0] < 0 or self._keys[page][0] == parent, (
                    "a table's pages are not a chain"
                )
                parent = self._uids[page]
            assert not table.committed or table.parent < 0 or table.parent == parent, (
                "a table's parent is not its last committed page"
            )
            assert all(self._uids[page] == 0 for page in table.pages[table.committed :]), (
                "a page is indexed before it is committed"
            )
