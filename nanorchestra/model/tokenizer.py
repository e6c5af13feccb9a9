"""Text to ids and back: any byte-level BPE, and the training of one of Qwen's kind.

Two encoders share one BPE model. `backend` knows the added tokens (`<|im_end|>`, `<think>`, ...);
`encode` does not, so no text from users and tools can forge a marker. Ids become bytes through a
table, and bytes text, so a character that is split over several ids is never decoded in part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from nanorchestra.errors import require
from nanorchestra.files import read_text, read_toml, write_whole
from nanorchestra.model.chat import NoFormat, Qwen3Format
from nanorchestra.schemas import Json, whole_characters

QWEN3 = read_toml(Path(__file__).with_name("tokens.toml"))
SPECIAL_TOKENS, TEXT_TOKENS = QWEN3["special"], QWEN3["text"]  # `skip_special` drops the first
ADDED_TOKENS = SPECIAL_TOKENS + TEXT_TOKENS
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja")
CONFIG = json.dumps(QWEN3["config"], indent=2) + "\n"  # a tokenizer_config.json
ASCII = [*b"\n", *range(0x20, 0x7F)]  # SmolLM2 lacks some bytes beyond
CACHED = 4096  # entries of the cache of encoded texts, and the most characters of an entry


def bytes_to_unicode() -> dict[int, str]:
    """Returns how byte-level BPE spells each byte, as one character (GPT-2).

    A printable one stands for itself; the others take the characters from U+0100 on in turn.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in characters:
            characters[byte] = chr(0x100 + len(characters) - len(printable))
    return characters


CHARACTERS = bytes_to_unicode()
BYTES = {character: byte for byte, character in CHARACTERS.items()}


class ChatFormat(Protocol):
    """How a model writes a conversation: Qwen3's (chat.py), or its own (formats/template.py)."""

    bos_ids: list[int]  # they begin a prompt that is text
    eos_ids: tuple[int, ...]  # they end a turn; a prompt has the first behind each
    reads_calls: bool  # takes tools, and has models write calls as parser.py reads them

    def encode(
        self, messages: list[Json], tools: list[Json] | None, enable_thinking: bool | None
    ) -> list[int]:
        """Returns the ids of a prompt, up to where the model's turn begins. UserError."""


class Tokenizer:
    """A byte-level BPE tokenizer.

    `vocab_size` is 1 + the largest id. `markers`: it has Qwen3's chat and tool tokens. `chat` is
    then Qwen3's format. Without them it is none, until a door sets the model's own
    (formats/load.py). `backend` also reads markers in text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        source: str = "tokenizer.json",
        companions: dict[str, str] | None = None,
    ) -> None:
        """Takes what tokenizer.json holds; UserError, naming `source`, if it is not byte-level.

        companions: the contents of other files that `save` writes beside it, by their names.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.source = backend, source
        self.companions = {"tokenizer_config.json": CONFIG} | (companions or {})
        self.markers = not lacking_markers(backend)

        self._ids = backend.get_vocab(with_added_tokens=True)
        lacking = [chr(byte) for byte in ASCII if CHARACTERS[byte] not in self._ids]
        require(
            not lacking,
            f"{source}: model.vocab lacks {len(lacking)} bytes of ASCII, such as {lacking[:1]}; "
            "expected a byte-level BPE",
        )
        self._plain = _without_added_tokens(backend)
        self._cached = lru_cache(CACHED)(self._encode)

        added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(self._ids.values())
        self._bytes = [b""] * self.vocab_size
        for token, i in self._ids.items():
            self._bytes[i] = token.encode() if i in added else bytes(BYTES[c] for c in token)
        self.chat: ChatFormat = Qwen3Format(self) if self.markers else NoFormat(source)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json of a checkpoint, and what `save` will copy beside it.

        Raises UserError if it is no byte-level BPE.
        """
        file = Path(path) / "tokenizer.json"
        backend = tokenizers.Tokenizer.from_str(read_text(file))
        is_bpe = isinstance(backend.model, models.BPE)
        require(is_bpe, f"{file}: model.type: expected 'BPE', as Qwen's is")
        companions = {}
        for companion in COMPANIONS:
            beside = file.with_name(companion)
            if beside.exists():
                companions[companion] = read_text(beside)
        return cls(backend, str(file), companions)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a turn; none without a chat format."""
        return self.chat.eos_ids

    @property
    def end_of_turn(self) -> int:
        """Returns the first of `eos_ids`, which a prompt has behind a turn; -1 without any."""
        return self.eos_ids[0] if self.eos_ids else -1

    @property
    def bos_ids(self) -> list[int]:
        """Returns the ids that begin a prompt that is text."""
        return self.chat.bos_ids

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, none of them an added token's."""
        return list(self._cached(text) if len(text) <= CACHED else self._encode(text))

    def _encode(self, text) -> list[int]:
        try:
            if len(text) > CACHED:  # encode_batch, unlike encode, releases the GIL
                return self._plain.encode_batch([text])[0].ids
            return self._plain.encode(text).ids
        except (TypeError, UnicodeEncodeError):  # half a surrogate pair, which JSON can bring
            return self._plain.encode(whole_characters(text)).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        skip_special drops what `text_bytes` does, but not <think> or <tool_call>.
        """
        whole = self.text_bytes(ids) if skip_special else b"".join(map(self.bytes_of, ids))
        return whole.decode("utf-8", "replace")

    def text_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of `ids` without special tokens, <|im_end|> and the like."""
        not_text = self._special_ids.union(self.eos_ids)
        return b"".join(self._bytes[i] for i in ids if i not in not_text)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of one id below vocab_size; b"" for an id that is not used."""
        return self._bytes[token]

    def token_id(self, token: str) -> int:
        """Returns the id of an added token by its text, such as "<|im_end|>"."""
        return self._ids[token]

    def require_markers(self, model: str | Path) -> None:
        """Raises UserError unless it has Qwen3's markers; `model`: as the user named it."""
        lacking = ", ".join(lacking_markers(self.backend))
        require(
            self.markers,
            f"{model}: its tokenizer lacks {lacking}: it can chat, but not call tools or be "
            f"trained; python -m nanorchestra.formats.adopt {model} --out DIR, in the project's "
            "directory, gives it the tokens",
        )

    def save(self, path: str | Path) -> None:
        """Writes the files that transformers' AutoTokenizer loads into the directory `path`."""
        Path(path).mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": self.backend.to_str(pretty=True) + "\n", **self.companions}
        for name, text in files.items():
            write_whole(Path(path) / name, text)


def lacking_markers(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns Qwen3's chat and tool tokens that are not among the added tokens."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    return [token for token in QWEN3["required"] if token not in added]


def _without_added_tokens(backend) -> tokenizers.Tokenizer:
    """Returns the same BPE without added tokens, so that no text becomes one.

    Some vocabularies hold their added tokens too. Those that text could reach are left out: with
    `ignore_merges`, as in Llama 3, the text "<|eot_id|>" would be one word of such a vocabulary.
    """
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    unsplit = tokenizers.Tokenizer(backend.model)
    unsplit.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encodings = unsplit.encode_batch(added)
    reached = {t for t, encoding in zip(added, encodings, strict=True) if encoding.tokens == [t]}
    model = backend.model
    if reached or model.unk_token in added:
        state = json.loads(model.__getstate__())
        vocab = {token: i for token, i in state["vocab"].items() if token not in reached}
        merges = [tuple(merge) for merge in state["merges"]]
        merges = [(a, b) for a, b in merges if not reached & {a, b, a + b}]
        model = models.BPE(vocab, merges, ignore_merges=state["ignore_merges"])
    plain = tokenizers.Tokenizer(model)
    plain.normalizer = backend.normalizer
    plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with Qwen3's pre-tokenisation and its added tokens as last ids.

    `vocab_size` counts bytes, merges and added tokens; the result is smaller if too few pairs occur
    twice. Added tokens are cut out of `texts`, which may be rendered conversations. Deterministic.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(QWEN3["pattern"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        min_frequency=2,
        initial_alphabet=sorted(BYTES),
        special_tokens=[],
        show_progress=False,
    )
    markers = re.compile("|".join(map(re.escape, ADDED_TOKENS)))
    pieces = (piece for text in texts for piece in markers.split(text) if piece)
    backend.train_from_iterator(pieces, trainer)
    backend.add_special_tokens(SPECIAL_TOKENS)
    backend.add_tokens([AddedToken(token, normalized=False) for token in TEXT_TOKENS])
    return Tokenizer(backend)
