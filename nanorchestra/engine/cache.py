"""Book-keeping of the paged KV cache: which page holds which tokens of which sequences. No torch.

A page holds the keys and values of `page_size` consecutive positions. A full page that a completed
step has written is indexed under the exact key (uid of the page before it, its tokens); the root
before a first page stands for the weight version. Uids are never reused, so a key names the whole
prefix without a hash, and collisions cannot occur. A page that no sequence holds stays indexed
("idle") until its place is needed; the least recently used one is evicted first.

Sequences with a common prefix hold the same pages. A fork shares the half-full last page too, and
a sequence that is about to write into a shared page gets a copy of it (copy-on-write).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[int, tuple[int, ...]]


@dataclass(eq=False)
class PageTable:
    """One sequence's pages in order.

    The first `written` positions have their KV. The first `committed` pages are in the index.
    A table that is `kept` belongs to a session and outlives its requests.
    """

    pages: list[int] = field(default_factory=list)
    written: int = 0
    committed: int = 0
    parent: int = 0  # uid of the last committed page, or the root
    kept: bool = False
    age: int = -1  # id of the first request with this table


class PageCache:
    """Reference-counted pages with exact prefix sharing.

    Invariant (tests/invariants.py): every page is either free, idle (indexed and not held) or held.
    The references of a page are the tables it stands in. A page leaves the index before its parent.
    """

    def __init__(self, num_pages: int, page_size: int = 16):
        self.num_pages, self.page_size = num_pages, page_size
        self.copies: dict[int, int] = {}  # page -> page to copy into it before the next step
        self._last_uid = 0
        self.clear(0)

    def clear(self, version: int) -> None:
        """Forgets all pages and starts anew for weights of this version. No table may hold pages.

        Pages are then handed out from the lowest on. The runner sorts rows by page, so a run's
        rounding does not depend on what was cached before.
        """
        self.root = -1 - version
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * self.num_pages
        self._uids = [0] * self.num_pages  # 0: not indexed
        self._keys: dict[int, Key] = {}
        self._index: dict[Key, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that can be handed out now: free and idle ones."""
        return len(self._free) + len(self._idle)

    def match(self, table: PageTable, ids: Sequence[int]) -> None:
        """Fills the empty `table` with the longest indexed prefix of `ids`.

        The last token never matches, because its logits still have to be computed.
        """
        table.parent, ids = self.root, ids[:-1]
        while (page := self._index.get(self.next_key(table, ids))) is not None:
            self._hold(page)
            table.pages.append(page)
            table.parent = self._uids[page]
            table.committed += 1
        table.written = table.committed * self.page_size

    def next_key(self, table: PageTable, ids: Sequence[int]) -> Key | None:
        """Returns the key of the first page not committed yet, or None if `ids` do not fill it."""
        start = table.committed * self.page_size
        tokens = tuple(ids[start : start + self.page_size])
        return (table.parent, tokens) if len(tokens) == self.page_size else None

    def missing(self, table: PageTable, length: int) -> int:
        """Counts the pages that `grow` would take."""
        pages = -(-length // self.page_size)
        return max(0, pages - len(table.pages)) + self._shares_next(table)

    def grow(self, table: PageTable, length: int) -> bool:
        """Makes positions up to `length` writable. Returns False and changes nothing if it cannot.

        Idle pages are evicted as needed. A shared page that would be written is copied.
        """
        missing = self.missing(table, length)
        if missing > self.available:
            return False
        if self._shares_next(table):
            first = table.written // self.page_size
            source, table.pages[first] = table.pages[first], self._take()
            self._drop(source)
            self.copies[table.pages[first]] = source
            missing -= 1
        table.pages += [self._take() for _ in range(missing)]
        return True

    def fork(self, table: PageTable, other: PageTable, length: int) -> None:
        """Fills the empty `other` with the pages of the first `length` positions of `table`.

        Positions that the coming step writes count too.
        """
        other.pages[:] = table.pages[: -(-length // self.page_size)]
        for page in other.pages:
            self._hold(page)
        other.written, other.committed, other.parent = table.written, table.committed, table.parent

    def commit(self, table: PageTable, ids: Sequence[int], written: int) -> None:
        """Records that the KV of ids[:written] stands in the table's pages, and indexes full ones.

        If the index has a page with the same key already, the table takes that one and gives its
        own back. The contents are equal, and from then on both sequences read one page.
        """
        table.written = written
        while (table.committed + 1) * self.page_size <= written:
            page, key = table.pages[table.committed], self.next_key(table, ids)
            known = self._index.setdefault(key, page)
            if not self._uids[known]:
                self._last_uid += 1
                self._keys[page], self._uids[page] = key, self._last_uid
            elif known != page:
                self._hold(known)
                self._drop(page)
                table.pages[table.committed] = known
            table.parent = self._uids[known]
            table.committed += 1

    def release(self, table: PageTable) -> None:
        """Gives all pages back and empties the table.

        The last page goes first, so that a prefix is evicted from its end.
        """
        for page in reversed(table.pages):
            self._drop(page)
        table.pages.clear()
        table.written = table.committed = 0

    def _shares_next(self, table) -> bool:
        """True if the next position to write lies in a page that another sequence holds too."""
        next_page = table.written // self.page_size
        return next_page < len(table.pages) and self._refs[table.pages[next_page]] > 1

    def _hold(self, page):
        self._idle.pop(page, None)
        self._refs[page] += 1

    def _take(self) -> int:
        page = self._free.pop() if self._free else self._evict()
        self._refs[page] = 1
        return page

    def _drop(self, page):
        self._refs[page] -= 1
        if not self._refs[page]:
            if self._uids[page]:
                self._idle[page] = None
            else:
                self._free.append(page)

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._index[self._keys.pop(page)]
        self._uids[page] = 0
        return page
