"""Hands out the pages of the KV cache and shares those of common prefixes. No torch.

A page (vLLM's block) holds the keys and values of `page_size` consecutive positions of a sequence.
`Sequence.block_table` lists the pages of one. A full page that a launched step writes is
indexed under an exact key:

    (uid of the page before it, its tokens)      before the first page: ROOT

Uids are never reused, so a key names the whole prefix; there is no hash and no collision. A page
is held by the sequences whose tables it stands in. One that no sequence holds stays indexed
("idle") until its place is needed, the least recently used first; one that is not indexed is free.
"""

from collections import OrderedDict

from nanorchestra.engine.sequence import ROOT, Sequence

Key = tuple[int, tuple[int, ...]]


class BlockManager:
    """The pages of one KV cache.

    Invariant (tests/invariants.py): every page is either free, idle or held. The references of a
    page are the block tables it stands in. A page leaves the index before the page before it does.
    """

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages = num_pages
        self.page_size = page_size
        self._uids_given = 0
        self.clear()

    def clear(self) -> None:
        """Forgets all pages, as for new weights. No sequence may hold any."""
        # The lowest is handed out first. The runner sorts rows by page, so a run's rounding does
        # not depend on what was cached before.
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._references = [0] * self.num_pages
        self._uids = [0] * self.num_pages  # 0: not indexed
        self._keys: dict[int, Key] = {}
        self._index: dict[Key, int] = {}

    @property
    def available(self) -> int:
        """Number of pages that can be handed out now: free and idle ones."""
        return len(self._free) + len(self._idle)

    def match(self, sequence: Sequence) -> None:
        """Fills the empty block table with the pages of the longest indexed prefix.

        The last token never matches, because its logits still have to be computed.
        """
        while True:
            key = self.next_key(sequence, len(sequence.ids) - 1)
            if key is None or key not in self._index:
                break
            page = self._index[key]
            self._hold(page)
            sequence.block_table.append(page)
            sequence.last_uid = self._uids[page]
            sequence.num_indexed += 1
        sequence.num_computed = sequence.num_indexed * self.page_size

    def next_key(self, sequence: Sequence, length: int) -> Key | None:
        """Returns the key of the first page not indexed, or None if ids[:length] do not fill it."""
        start = sequence.num_indexed * self.page_size
        end = start + self.page_size
        if end > length:
            return None
        return sequence.last_uid, tuple(sequence.ids[start:end])

    def missing(self, sequence: Sequence, length: int) -> int:
        """Returns how many pages `grow` would take."""
        num_pages = -(-length // self.page_size)
        return max(0, num_pages - len(sequence.block_table))

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Takes pages for the positions up to `length`, and evicts idle ones where none is free.

        Returns False and changes nothing if there are too few.
        """
        missing = self.missing(sequence, length)
        if missing > self.available:
            return False
        for _ in range(missing):
            sequence.block_table.append(self._take())
        return True

    def commit(self, sequence: Sequence, num_computed: int) -> None:
        """Records that ids[:num_computed] have their KV, and indexes the pages that are full.

        If the index has a page with the same key already, the sequence takes that one and gives its
        own back: the contents are equal, and from then on both sequences read one page. A step that
        is launched already reads its own one. It is full, and a later step alone writes to it.
        """
        sequence.num_computed = num_computed
        while (key := self.next_key(sequence, num_computed)) is not None:
            page = sequence.block_table[sequence.num_indexed]
            indexed = self._index.get(key)
            if indexed is None:
                self._uids_given += 1
                self._uids[page] = self._uids_given
                self._keys[page] = key
                self._index[key] = page
            elif indexed != page:
                self._hold(indexed)
                self._drop(page)
                sequence.block_table[sequence.num_indexed] = indexed
                page = indexed
            sequence.last_uid = self._uids[page]
            sequence.num_indexed += 1

    def release(self, sequence: Sequence) -> None:
        """Gives all pages back and empties the block table.

        The last page goes first, so that a prefix is evicted from its end.
        """
        for page in reversed(sequence.block_table):
            self._drop(page)
        sequence.block_table.clear()
        sequence.num_computed = 0
        sequence.num_indexed = 0
        sequence.last_uid = ROOT

    def _hold(self, page):
        self._idle.pop(page, None)
        self._references[page] += 1

    def _drop(self, page):
        self._references[page] -= 1
        if self._references[page]:
            return
        if self._uids[page]:
            self._idle[page] = None
        else:
            self._free.append(page)

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._unindex(page)
        self._references[page] = 1
        return page

    def _unindex(self, page):
        del self._index[self._keys.pop(page)]
        self._uids[page] = 0
