"""Which ids may be drawn next, so that every tool call is valid JSON with the name of a known tool. Optional; sees no logits, no torch.

A turn is free text until `<tool_call>` stands in it outside of its reasoning: the one id, or the tag spelled out, as parser.py reads it.
Then its bytes are held to what chat.py renders: {"name": "...", "arguments": {...}} with any JSON object as arguments, a line break or
none on either side. JSON is LL(1) over bytes, so a state is a stack of symbols, and a mask over the ids comes from walking all of them
through the automaton at once. Inside a call no added token may be drawn but `</tool_call>`, as the one id that ends it: strings may
hold the text of tags, in ordinary ids. Every state has a byte that leads on, and every byte is an id: there is no dead end.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple, Sequence

import numpy as np

from nanorchestra.errors import UserError
from nanorchestra.model.parser import CALL, THINK, THINK_END
from nanorchestra.model.tokenizer import Tokenizer

MAX_DEPTH, MAX_SPACES, MAX_DIGITS = (
    16,
    16,
    64,
)  # of nested containers, the arguments included; of characters in a gap; of digits in a row
CACHED_MASKS, CACHED_MOVES = 256, 2048  # a mask is a byte per id of the vocabulary
OPENING, SPACES = (
    THINK.encode(),
    tuple(chr(code).encode() for code in range(0x3001) if chr(code).isspace()),
)
START, REASONING, CONTENT, HEADER, ARGUMENTS = (
    "start",
    "reasoning",
    "content",
    "header",
    "arguments",
)


class State(NamedTuple):
    """Where a turn stands. `headers` are the texts that a call may begin with; `at` is the place within the phase:

    start: the bytes that may yet turn out to be white space or <think>; reasoning, content: how much of the tag that ends the phase has
    been seen; header: what may follow, one of these; arguments: the stack of symbols that are due.
    """

    phase: str
    at: bytes | int | tuple[bytes, ...] | str
    headers: tuple[bytes, ...]

    @property
    def in_call(self) -> bool:
        return self.phase in (HEADER, ARGUMENTS)

    @property
    def closable(self) -> bool:
        """The JSON object is complete: `</tool_call>` may follow."""
        return self.phase == ARGUMENTS and self.at in (
            "L",
            "",
        )  # at most the line break before the tag is due


class ToolCallGrammar:
    """Guides the turns of any number of requests, whatever their tools; made once per tokenizer. All that changes is in the States.

    Raises UserError if the tokenizer has no id for some single byte, without which a call could not always be finished.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._texts = [tokenizer.bytes_of(i) for i in range(tokenizer.vocab_size)]
        self._added, self._call_end = tokenizer.added_ids, tokenizer.tool_call_end
        if missing := {bytes([byte]) for byte in range(256)}.difference(self._texts):
            raise UserError(
                f"tokenizer: no id for the single byte {min(missing)!r}; guided tool calls need one for each byte"
            )
        self._joined = np.frombuffer(b"".join(self._texts), np.uint8)
        self._lengths = np.array([len(text) for text in self._texts])
        self._starts = self._lengths.cumsum() - self._lengths
        self._ordinary = np.array(
            [i for i, text in enumerate(self._texts) if text and i not in self._added]
        )
        self._crossing = np.array(
            [i for i, text in enumerate(self._texts) if b">" in text[:-1]], int
        )  # may end a tag and go on
        self._mask = lru_cache(CACHED_MASKS)(self._make_mask)

    def start(self, names: Sequence[str], enable_thinking: bool | None = None) -> State:
        """The state right after the generation prompt. `names`: the tools that may be called. UserError if there are none, or one is empty.

        enable_thinking as in `chat.parse`: False means that the turn has no reasoning, so that calls in a <think> block are calls.
        """
        if not names or not all(names):
            raise UserError(
                f"tool names: {list(names)!r}; guided tool calls need at least one name, and none that is empty"
            )
        calls = sorted(
            {f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ' for name in names}
        )
        # "backslashreplace" writes half a surrogate pair, which UTF-8 cannot hold, as the escape that JSON has for it
        headers = tuple(
            (line + call).encode(errors="backslashreplace") for line in ("", "\n") for call in calls
        )
        return (
            State(CONTENT, 0, headers) if enable_thinking is False else State(START, b"", headers)
        )

    def advance(self, state: State, token: int) -> State:
        """The state after `token`. Raises ValueError for a token that is not allowed."""
        after: State | None = state
        if state.in_call and (token in self._added or not self._texts[token]):
            after = (
                State(CONTENT, 0, state.headers)
                if token == self._call_end and state.closable
                else None
            )
        else:
            for byte in self._texts[token]:
                after = after and _moves(after).get(byte)
        if after is None:
            raise ValueError(
                f"token id {token} ({self._texts[token]!r}) is not allowed after {state.phase} {state.at!r}"
            )
        return after

    def allowed(self, state: State) -> np.ndarray | None:
        """bool [vocab_size], read-only: True for the ids that may be drawn. None: all of them. Cached for the states of late."""
        return self._mask(
            State(state.phase, state.at, ()) if state.in_call else state
        )  # tools with one rest of a header share its mask

    def _make_mask(self, state: State) -> np.ndarray | None:
        """All ids that could be refused go, a byte at a time, through a table of moves with a row for each state that one of them reaches."""
        ids = self._ordinary if state.in_call else self._crossing
        mask = np.full(len(self._texts), not state.in_call)
        mask[ids] = False
        mask[self._call_end] |= state.closable
        numbers, rows, refused = {state: 0}, {}, np.full(256, -1)
        at, position = np.zeros(len(ids), int), 0
        while len(ids):
            for number in set(np.flatnonzero(np.bincount(at)).tolist()) - rows.keys():
                moves = _moves(list(numbers)[number])
                rows[number] = refused.copy()
                rows[number][list(moves)] = [
                    numbers.setdefault(after, len(numbers)) for after in moves.values()
                ]
            table = np.stack([rows.get(number, refused) for number in range(len(numbers))])
            at = table[at, self._joined[self._starts[ids] + position]]
            position += 1
            ended = self._lengths[ids] == position
            mask[ids[ended & (at >= 0)]] = True
            goes_on = ~ended & (at >= 0)
            ids, at = ids[goes_on], at[goes_on]
        mask.flags.writeable = False
        return None if mask.all() else mask


@lru_cache(CACHED_MOVES)
def _moves(state: State) -> dict[int, State]:
    """The automaton: each byte that may come, and the state it leads to. Outside of calls that is every byte."""
    phase, at, headers = state
    if phase == ARGUMENTS:
        return {byte: State(ARGUMENTS, stack, headers) for byte, stack in _stacks(at).items()}
    if phase == HEADER:
        after: dict[int, list[bytes]] = {}
        for text in at:
            after.setdefault(text[0], []).append(text[1:])
        return {
            byte: State(HEADER, tuple(rest), headers)
            if rest[0]
            else State(ARGUMENTS, "O}L", headers)
            for byte, rest in after.items()
        }
    if phase == START:
        state = State(CONTENT, 0, headers)
        for byte in at:
            state = _moves(state)[byte]
        moves = dict(_moves(state))
        for seen in (text[: len(at) + 1] for text in (OPENING, *SPACES) if text.startswith(at)):
            held = b"" if seen in SPACES else seen
            moves[seen[-1]] = (
                State(REASONING, 0, headers) if seen == OPENING else State(START, held, headers)
            )
        return moves
    tag, after_tag = (
        (THINK_END, State(CONTENT, 0, headers))
        if phase == REASONING
        else (CALL, State(HEADER, headers, headers))
    )
    moves = dict.fromkeys(range(256), State(phase, 0, headers))
    moves[ord(tag[0])] = State(phase, 1, headers)
    moves[ord(tag[at])] = State(phase, at + 1, headers) if at + 1 < len(tag) else after_tag
    return moves


def _range(first: int, last: int) -> str:
    return "".join(map(chr, range(first, last + 1)))


# The rules of JSON: symbol -> {bytes that may come: the symbols that are due after them}. What is no capital letter stands for itself.
GAP, DIGITS = "W" * MAX_SPACES, "R" * (MAX_DIGITS - 1)
MEMBER = f"S{GAP}:{GAP}V{GAP}N"  # after the quote that opens the key
INTEGER = {"0": "FX", "123456789": DIGITS + "FX"}
VALUE = {
    "{": GAP + "M",
    "[": GAP + "I",
    '"': "S",
    "-": "Z",
    **INTEGER,
    "t": "rue",
    "f": "alse",
    "n": "ull",
}
RULES = {
    "O": {"{": GAP + "M"},                                                                 # an object
    "M": {'"': MEMBER, "}": ""},                                                           # its first member, or none
    "N": {",": f'{GAP}"{MEMBER}', "}": ""},                                                # its next member, or its end
    "V": VALUE,
    "I": {**{first: f"{rest}{GAP}J" for first, rest in VALUE.items()}, "]": ""},           # an array's first item, or none
    "J": {",": f"{GAP}V{GAP}J", "]": ""},                                                  # its next item, or its end
    "S": {                                                                                 # the rest of a string, in strict UTF-8
        '"': "", "\\": "ES", " !" + _range(0x23, 0x5B) + _range(0x5D, 0x7F): "S",
        _range(0xC2, 0xDF): "CS", _range(0xE1, 0xEC) + "\xee\xef": "CCS", _range(0xF1, 0xF3): "CCCS",
        "\xe0": "ACS", "\xed": "BCS", "\xf0": "PCCS", "\xf4": "QCCS",
    },
    "C": {_range(0x80, 0xBF): ""}, "A": {_range(0xA0, 0xBF): ""}, "B": {_range(0x80, 0x9F): ""},
    "P": {_range(0x90, 0xBF): ""}, "Q": {_range(0x80, 0x8F): ""},
    "E": {'"\\/bfnrt': "", "u": "U"},                                                      # after a backslash
    "U": {"0123456789abcefABCEF": "HHH", "dD": "T"}, "H": {"0123456789abcdefABCDEF": ""},  # after \u
    "T": {"01234567": "HH", "89abAB": "HH\\uKYHH"}, "K": {"dD": ""}, "Y": {"cdefCDEF": ""},  # after \ud: surrogates come in pairs
    "Z": INTEGER, "D": {"0123456789": ""}, "G": {"+-": "DRR", "0123456789": "RR"},         # after a minus; a digit; after an "e"
    "W": {" \t\n\r": ""}, "R": {"0123456789": ""}, "F": {".": "D" + DIGITS}, "X": {"eE": "G"}, "L": {"\n": ""},
}  # fmt: skip
OPTIONAL, CONTAINERS = "WRFXL", "MNIJ"


def _stacks(stack: str) -> dict[int, str]:
    """Each byte that may come next -> the symbols that are due after it. An optional symbol may come, or what stands behind it."""
    after: dict[int, str] = {}
    for i, symbol in enumerate(stack):
        if symbol in stack[:i]:
            continue  # of several optional ones it is the first that comes
        for characters, due in RULES.get(symbol, {symbol: ""}).items():
            rest = due + stack[i + 1 :]
            if sum(map(rest.count, CONTAINERS)) <= MAX_DEPTH:
                after |= dict.fromkeys(characters.encode("latin-1"), rest)
        if symbol not in OPTIONAL:
            break
    return after
