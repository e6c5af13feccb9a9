"""Text to ids and back: a byte-level BPE of the Qwen kind, its training, and UTF-8 streaming.

Two encoders share one BPE model. One knows the added tokens (`<|im_end|>`, `<think>`, ...); the
other does not, so no text from users and tools can forge a marker. Ids become text through a table
of bytes, so a character that is split over several ids is never emitted in part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_object, read_regular, read_toml, write_whole

QWEN3 = read_toml(Path(__file__).with_name("tokens.toml"))
SPECIAL_TOKENS, TEXT_TOKENS = QWEN3["special"], QWEN3["text"]  # `skip_special` drops the first
ADDED_TOKENS = SPECIAL_TOKENS + TEXT_TOKENS
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja")
# Byte-level BPE spells a byte as one character: itself if printable, else the next from U+0100 on.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_PRINTABLE_FIRST = sorted(range(256), key=lambda byte: chr(byte) not in _ALPHABET)
_BYTES = dict(zip(_ALPHABET, _PRINTABLE_FIRST, strict=True))
_LARGEST_ID = 1 << 22  # the largest vocabularies have 260 thousand ids
_CACHED = 4096  # entries of the cache of encoded texts, and the most characters of an entry


class Tokenizer:
    """A tokenizer of the Qwen kind.

    `vocab_size` is 1 + the largest id, `eos_ids` end a turn, `im_end` is the id of <|im_end|>.
    `backend` also reads markers in text.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str = "tokenizer.json") -> None:
        """Takes what tokenizer.json holds; UserError, naming `source`, if it is not Qwen's kind."""
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self._plain = tokenizers.Tokenizer(backend.model)  # the same merges, no added tokens
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._ids = backend.get_vocab(with_added_tokens=True)
        for token in QWEN3["required"]:
            is_added = self._ids.get(token) in added
            require(is_added, f"{source}: added_tokens has no {token!r}, as a Qwen3 tokenizer has")
        lacking = [c for c in _ALPHABET if c not in self._ids]
        require(
            not lacking,
            f"{source}: model.vocab lacks {len(lacking)} of the 256 bytes, such as {lacking[:1]}; "
            "expected a byte-level BPE",
        )
        self.vocab_size = 1 + max(self._ids.values())
        require(
            self.vocab_size <= _LARGEST_ID,
            f"{source}: has the token id {self.vocab_size - 1}; expected ids below {_LARGEST_ID}",
        )
        self._bytes = [b""] * self.vocab_size
        for token, i in self._ids.items():
            spelt = i in added or all(c in _BYTES for c in token)
            require(
                spelt, f"{source}: the token {token!r} is not of a byte-level BPE, as Qwen's are"
            )
            self._bytes[i] = token.encode() if i in added else bytes(_BYTES[c] for c in token)
        self.im_end = self.token_id("<|im_end|>")
        self.eos_ids = (self.im_end, self.token_id("<|endoftext|>"))
        self._companions = {"tokenizer_config.json": json.dumps(QWEN3["config"], indent=2) + "\n"}
        self._cached = lru_cache(_CACHED)(self._encode)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json of a checkpoint directory, and what `save` will copy beside it.

        Raises UserError if it cannot be read or lacks Qwen3's chat tokens.
        """
        file = Path(path) / "tokenizer.json"
        data = read_object(file)
        model = data.get("model")
        is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
        require(is_bpe, f"{file}: model.type: expected 'BPE', as Qwen's is")
        for field in ("continuing_subword_prefix", "end_of_word_suffix"):
            # With a prefix the library cuts tokens inside characters, and can abort the process.
            stated = model.get(field)
            require(
                stated in (None, ""),
                f"{file}: model.{field} = {stated!r}: expected none, as in Qwen's",
            )
        try:
            backend = tokenizers.Tokenizer.from_str(json.dumps(data))
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{file}: not a readable tokenizer.json ({error})") from None
        tokenizer = cls(backend, str(file))
        for companion in COMPANIONS:
            beside = file.with_name(companion)
            if os.path.lexists(beside):
                if companion.endswith(".json"):
                    read_object(beside)  # checks it; kept is the text
                tokenizer._companions[companion] = read_regular(beside)
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, none of them an added token's."""
        return list(self._cached(text) if len(text) <= _CACHED else self._encode(text))

    def _encode(self, text) -> list[int]:
        try:
            if len(text) > _CACHED:  # other threads go on meanwhile, unlike in `encode`
                return self._plain.encode_batch([text])[0].ids
            return self._plain.encode(text).ids
        except (TypeError, UnicodeEncodeError):  # half a surrogate pair, which JSON can bring
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return self._plain.encode(text).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        skip_special drops <|im_end|> and the like, but not <think> or <tool_call>.
        """
        whole = self.text_bytes(ids) if skip_special else b"".join(map(self.bytes_of, ids))
        return whole.decode("utf-8", "replace")

    def text_bytes(self, ids: Sequence[int]) -> bytes:
        """Returns the bytes of `ids` without special tokens."""
        return b"".join(self._bytes[i] for i in ids if i not in self._special_ids)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of one id below vocab_size; b"" for an id that is not used."""
        return self._bytes[token]

    def token_id(self, token: str) -> int:
        """Returns the id of an added token by its text, such as "<|im_end|>"."""
        return self._ids[token]

    def save(self, path: str | Path) -> None:
        """Writes the files that transformers' AutoTokenizer loads into the directory `path`."""
        Path(path).mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": self.backend.to_str(pretty=True) + "\n", **self._companions}
        for name, text in files.items():
            write_whole(Path(path) / name, text)


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
        initial_alphabet=_ALPHABET,
        special_tokens=[],
        show_progress=False,
    )
    markers = re.compile("|".join(map(re.escape, ADDED_TOKENS)))
    pieces = (piece for text in texts for piece in markers.split(text) if piece)
    backend.train_from_iterator(pieces, trainer)
    backend.add_special_tokens(SPECIAL_TOKENS)
    backend.add_tokens([AddedToken(token, normalized=False) for token in TEXT_TOKENS])
    return Tokenizer(backend)
