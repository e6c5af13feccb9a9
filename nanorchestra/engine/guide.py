"""Which ids may be drawn next, so that every tool call is valid JSON with the name of a known tool.

A turn is free text until `<tool_call>` stands in it outside of its reasoning: as its one id, or
spelled out, as parser.py reads it. From there its bytes follow what chat.py renders: {"name": ...,
"arguments": {...}}, with any JSON object as arguments and at most one space in a gap, on lines of
their own or not. JSON is LL(1) over bytes: a state is a stack of symbols, and the mask of a state
comes from walking all ids through the automaton at once. Inside a call the only added token that
may be drawn is `</tool_call>`, which ends it. Every state has a byte that leads on, and every byte
is an id, so there is no dead end. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nanorchestra.errors import require
from nanorchestra.model.parser import CALL, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer

MAX_DEPTH = 16  # nested containers, the arguments included: a model cannot open them without end
CACHED_MASKS, CACHED_MOVES = 256, 2048  # states; a mask is a byte for each id of the vocabulary
START, REASONING, CONTENT, CALLING = "start", "reasoning", "content", "calling"


class State(NamedTuple):
    """Where a turn stands. `calls` are the stacks of symbols that a call may begin with.

    `at` is the place in the phase. Outside of calls: the last bytes, as far as a tag may begin with
    them. In a call: the stacks of symbols of which one is due.
    """

    phase: str
    at: bytes | tuple[str, ...]
    calls: tuple[str, ...]

    @property
    def in_call(self) -> bool:
        """True between <tool_call> and </tool_call>."""
        return self.phase == CALLING

    @property
    def closable(self) -> bool:
        """True if the JSON object is complete, so that </tool_call> may follow."""
        return self.in_call and self.at in (("L",), ("",))  # a line break may come before it


class ToolCallGrammar:
    """Guides any number of requests. Made once for a tokenizer; all that changes is in the States.

    Raises UserError if the tokenizer has no id for some single byte.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._texts = [tokenizer.bytes_of(i) for i in range(tokenizer.vocab_size)]
        self._added, self._call_end = tokenizer.added_ids, tokenizer.tool_call_end
        missing = {bytes([byte]) for byte in range(256)}.difference(self._texts)
        require(
            not missing, f"tokenizer: no id for the bytes {sorted(missing)[:3]}, guides need it"
        )
        self._lengths = np.array(list(map(len, self._texts)))
        self._bytes = np.array(self._texts).view(np.uint8).reshape(len(self._texts), -1)
        texts = list(enumerate(self._texts))
        self._ordinary = np.array([i for i, text in texts if text and i not in self._added])
        # Outside of calls, only an id that ends a tag and goes on can be refused.
        self._crossing = np.array([i for i, text in texts if b">" in text[:-1]], np.int64)
        self._mask = lru_cache(CACHED_MASKS)(self._make_mask)

    def start(self, names: Sequence[str]) -> State:
        """Returns the state after the generation prompt, with `names` as the tools to call."""
        names = [json.dumps(name, ensure_ascii=False) for name in sorted(set(names))]
        headers = [
            f'{line}{{"name": {name}, "arguments": ' for line in ("", "\n") for name in names
        ]
        calls = ("".join(chr(256 + byte) for byte in header.encode()) for header in headers)
        calls = tuple(call + "O}L" for call in calls)
        return State(START, b"", calls)

    def advance(self, state: State, token: int) -> State | None:
        """Returns the state after `token`, or None if it is not allowed."""
        if state.in_call and (token in self._added or not self._texts[token]):
            ends = token == self._call_end and state.closable
            return State(CONTENT, b"", state.calls) if ends else None
        after: State | None = state
        for byte in self._texts[token]:
            after = after and _moves(after).get(byte)
        return after

    def allowed(self, state: State) -> np.ndarray | None:
        """Returns the ids that may be drawn, bool [vocab_size], read-only. None: all of them."""
        if state.in_call:  # calls share their masks, whatever tools are offered
            state = state._replace(calls=())
        return self._mask(state)

    def _make_mask(self, state: State) -> np.ndarray | None:
        """Walks all ids that could be refused, a byte at a time, through a table of moves.

        The table has a row for each state that one of them reaches.
        """
        ids = self._ordinary if state.in_call else self._crossing
        mask = np.full(len(self._texts), not state.in_call)
        mask[ids] = False
        mask[self._call_end] |= state.closable
        numbers = {state: 0}  # of the states that ids reach
        at, position = np.zeros(len(ids), np.int64), 0
        while len(ids):
            states = list(numbers)
            table = np.full((len(states), 256), -1)  # number of the state after each byte, or -1
            for number in np.flatnonzero(np.bincount(at)).tolist():
                for byte, after in _moves(states[number]).items():
                    table[number, byte] = numbers.setdefault(after, len(numbers))
            at = table[at, self._bytes[ids, position]]
            position += 1
            ended, taken = self._lengths[ids] == position, at >= 0
            mask[ids[ended & taken]] = True
            ids, at = ids[~ended & taken], at[~ended & taken]
        mask.flags.writeable = False
        return None if mask.all() else mask


@lru_cache(CACHED_MOVES)
def _moves(state: State) -> dict[int, State]:
    """The automaton: each byte that may come, and the state it leads to."""
    if not state.in_call:
        return {byte: _outside(state, bytes([byte])) for byte in range(256)}
    after: dict[int, list[str]] = {}
    for stack in state.at:
        for byte, rest in _stacks(stack).items():
            after.setdefault(byte, []).append(rest)
    return {byte: State(CALLING, tuple(rests), state.calls) for byte, rests in after.items()}


def _outside(state: State, byte: bytes) -> State:
    """Outside of calls every byte may come. What counts is the tag that ends the phase."""
    phase, seen, calls = state
    seen += byte
    if phase == START:
        seen = seen.lstrip()
        if seen == THINK.encode():
            return State(REASONING, b"", calls)
        if THINK.encode().startswith(seen):
            return State(START, seen, calls)
        phase = CONTENT
    tag = (THINK_END if phase == REASONING else CALL).encode()
    if seen.endswith(tag):
        return State(CALLING, calls, calls) if phase == CONTENT else State(CONTENT, b"", calls)
    held = next(seen[i:] for i in range(len(seen) + 1) if tag.startswith(seen[i:]))
    return State(phase, held, calls)


def _range(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


# The rules of JSON: symbol -> {bytes that may come: symbols that are due after them}.
# A symbol without a rule stands for its own byte; 256 is added where it would be one of these.
DIGITS, MEMBER = "0123456789", "SW:WVWN"
INTEGER = {"0": "FX", "123456789": "RFX"}
WORDS = {"t": "rue", "f": "alse", "n": "ull"}
VALUE = {"{": "WM", "[": "WI", '"': "S", "-": "Z", **INTEGER, **WORDS}
PLAIN = " !" + _range(0x23, 0x5B) + _range(0x5D, 0xFF)
RULES = {
    "O": {"{": "WM"},  # an object
    "M": {'"': MEMBER, "}": ""},  # its first member, or none
    "N": {",": 'W"' + MEMBER, "}": ""},  # its next member, or its end
    "V": VALUE,
    "I": {
        **{first: f"{rest}WJ" for first, rest in VALUE.items()},
        "]": "",
    },  # a first item, or none
    "J": {",": "WVWJ", "]": ""},  # the next item, or the array's end
    "Z": INTEGER,  # after a minus
    "D": {DIGITS: ""},
    "G": {"+-": "DR", DIGITS: "R"},  # after an e
    "S": {'"': "", "\\": "ES", PLAIN: "S"},  # the rest of a string
    "E": {'"\\/bfnrt': "", "u": "U"},  # after a backslash
    "U": {"0123456789abcefABCEF": "HHH", "dD": "THH"},  # after \u: no surrogates
    "H": {"0123456789abcdefABCDEF": ""},
    "T": {"01234567": ""},
    # these may come or not
    "W": {" ": ""},
    "R": {DIGITS: "R"},
    "F": {".": "DR"},
    "X": {"eE": "G"},
    "L": {"\n": ""},
}
OPTIONAL, CONTAINERS = "WRFXL", "MNIJ"


def _stacks(stack: str) -> dict[int, str]:
    """Returns each byte that may come next, and the symbols that are due after it."""
    after: dict[int, str] = {}
    for i, symbol in enumerate(stack):
        for characters, due in RULES.get(symbol, {chr(ord(symbol) % 256): ""}).items():
            rest = due + stack[i + 1 :]
            if sum(map(rest.count, CONTAINERS)) <= MAX_DEPTH:
                after |= dict.fromkeys(characters.encode("latin-1"), rest)
        if symbol not in OPTIONAL:
            break  # what stands behind an optional symbol may come in its place
    return after
