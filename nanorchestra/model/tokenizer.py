"""Text <-> ids: a byte-level BPE of the Qwen kind (`tokenizers` does the merging), its training, and UTF-8 streaming.

Two encoders share one BPE model: one knows the added tokens (`<|im_end|>`, `<think>`, ...), the other has never heard of them, so text
from users and tools cannot forge a marker whatever it spells. Ids turn into text through a table of bytes, so that a character which
is split over several ids is never emitted in halves. Knows nothing of chat templates (see chat.py).

    python -m nanorchestra.model.tokenizer train --input corpus.txt --vocab-size 2048 --out my-tokenizer
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import re
import sys
from collections import Counter
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Iterable, Iterator, NoReturn, Sequence

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from nanorchestra.errors import UserError

# Qwen2/Qwen3 pre-tokenisation: contractions, words with one leading non-letter, single digits, punctuation runs, line breaks, spaces.
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Qwen3's added tokens in the order of their ids. `special` ones are what skip_special drops; the others are part of the text.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TEXT_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja")
CONFIG = {  # what transformers wants to know beside tokenizer.json
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": False,
}
REQUIRED = (*SPECIAL_TOKENS[:3], *TEXT_TOKENS[:2], *TEXT_TOKENS[-4:])
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS) + len(TEXT_TOKENS)
LARGEST_ID = 2**24
PROBE, PROBED = (
    'Ask 3 experts: "naïve 東京 🙂", they\'ll say (x_1 + 2) * 40.5;\n\n  <end>\r\n\t',
    200,
)  # a text, and how many tokens, to try a tokenizer with
CACHED_TEXTS, CACHED_LENGTH = (
    4096,
    4096,
)  # entries, and the longest text (characters) that becomes one


class Tokenizer:
    """Qwen-kind tokenizer. Attributes: `vocab_size` (1 + the largest id), `eos_ids`, and the ids of the chat markers."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str = "tokenizer.json"):
        """`backend` is what tokenizer.json holds, `source` its name in messages. Raises UserError if it is not of the Qwen kind."""
        backend.no_truncation()
        backend.no_padding()
        self._marked = backend
        self._plain = tokenizers.Tokenizer(backend.model)  # same merges, no added tokens
        self._plain.normalizer = backend.normalizer
        self._plain.pre_tokenizer = backend.pre_tokenizer
        self._added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self._special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._ids = backend.get_vocab(with_added_tokens=True)
        missing = [token for token in REQUIRED if self._ids.get(token) not in self._added]
        if missing:
            raise UserError(
                f"{source}: added_tokens has no {missing[0]!r}; a Qwen3 tokenizer with its chat tokens is needed"
            )
        if not isinstance(backend.model, models.BPE):
            raise UserError(
                f"{source}: model.type is {type(backend.model).__name__!r}; it must be 'BPE'"
            )
        self._bytes = _byte_table(self._ids, self._added, source)
        self.vocab_size = len(self._bytes)
        self._companions = {
            "tokenizer_config.json": json.dumps(CONFIG, indent=2) + "\n"
        }  # files beside tokenizer.json, for save
        self.endoftext, self.im_start, self.im_end = (
            self._ids[token] for token in SPECIAL_TOKENS[:3]
        )
        self.tool_call_start, self.tool_call_end = (self._ids[token] for token in TEXT_TOKENS[:2])
        self.tool_response_start, self.tool_response_end, self.think_start, self.think_end = (
            self._ids[t] for t in TEXT_TOKENS[-4:]
        )
        self.eos_ids = (self.im_end, self.endoftext)
        self._cached = lru_cache(CACHED_TEXTS)(self._encode_plain)
        self._check(source)

    def _check(self, source: str) -> None:
        """UserError if text does not come back from its ids, or plain words of the vocabulary do not become their id."""
        back = self.decode(self._run(self._plain, PROBE))
        if back != PROBE:
            raise UserError(
                f"{source}: {PROBE!r} comes back from its ids as {back!r}; the tokenizer of the checkpoint, as published, is needed"
            )
        words = [
            token
            for token, i in sorted(self._ids.items(), key=itemgetter(1))
            if i not in self._added and len(token) > 1 and token.isascii() and token.isalpha()
        ]
        split = [
            word for word in words[:PROBED] if self._run(self._plain, word) != [self._ids[word]]
        ]
        if len(split) > len(words[:PROBED]) / 10:
            raise UserError(
                f"{source}: {split[0]!r} and {len(split) - 1} more tokens of the vocabulary are not what their text becomes; model.merges must be whole"
            )
        if self._run(self._marked, "".join(REQUIRED)) != [self._ids[token] for token in REQUIRED]:
            raise UserError(
                f"{source}: its chat tokens are not recognised in text; a Qwen3 tokenizer, as published, is needed"
            )

    @classmethod
    def from_dir(cls, path: str | os.PathLike) -> Tokenizer:
        """Reads tokenizer.json from a checkpoint directory; `save` will copy the configuration and the chat template beside it."""
        tokenizer = cls.from_file(Path(path) / "tokenizer.json")
        found = (Path(path) / name for name in COMPANIONS)
        tokenizer._companions |= {file.name: _read_text(file) for file in found if file.exists()}
        return tokenizer

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> Tokenizer:
        """Reads one tokenizer.json. Raises UserError if it is missing, unreadable, or not a byte-level BPE with Qwen3's chat tokens."""
        text = _read_text(Path(path))
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise UserError(
                f"{path}: not a tokenizer.json of the `tokenizers` library ({' '.join(str(error).split())})"
            ) from None
        return cls(backend, source=str(path))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`. special=False never yields the id of an added token, whatever the text spells; special=True recognises them."""
        if special:
            return self._run(self._marked, text)
        return (
            list(self._cached(text)) if len(text) <= CACHED_LENGTH else self._run(self._plain, text)
        )

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD. skip_special drops <|im_end|> and its like, not <think> or <tool_call>."""
        kept = [i for i in ids if i not in self._special_ids] if skip_special else ids
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", "replace")

    def bytes_of(self, token: int) -> bytes:
        """The bytes one id stands for (b"" for a gap in the ids). Raises ValueError for an id outside 0..vocab_size-1."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside 0..{self.vocab_size - 1}")
        return self._bytes[token]

    def token_id(self, token: str) -> int:
        """Id of an added token by its text, such as "<|im_end|>". Raises KeyError."""
        return self._ids[token]

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids of all added tokens, special or not."""
        return frozenset(self._added)

    def save(self, path: str | os.PathLike) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads. Each is written aside, then renamed."""
        files = {"tokenizer.json": self._marked.to_str(pretty=True) + "\n", **self._companions}
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                aside = Path(path) / f".{name}.{os.getpid()}"
                aside.write_text(text, encoding="utf-8")
                aside.replace(Path(path) / name)
        except OSError as error:
            raise UserError(
                f"{path}: cannot write the tokenizer there ({error.strerror}); a writable directory is needed"
            ) from None

    def _encode_plain(self, text: str) -> tuple[int, ...]:
        return tuple(self._run(self._plain, text))

    @staticmethod
    def _run(encoder: tokenizers.Tokenizer, text: str) -> list[int]:
        try:
            return encoder.encode(text, add_special_tokens=False).ids
        except (
            TypeError,
            UnicodeEncodeError,
        ):  # JSON can smuggle in half a surrogate pair; UTF-8 cannot hold one
            if not isinstance(text, str):
                raise
            return encoder.encode(
                text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
                add_special_tokens=False,
            ).ids


class IncrementalDecoder:
    """Streaming ids -> text: `feed` gives the text that is certain by now, `flush` the rest (an unfinished character becomes U+FFFD)."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(token))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE with Qwen's pre-tokenisation; Qwen3's 26 added tokens take the last ids. Deterministic.

    `vocab_size` counts bytes, merges and added tokens. The result is smaller when `texts` do not hold enough pairs that occur twice.
    Texts may be rendered conversations: added tokens in them are cut out. Raises UserError if vocab_size is below 282.
    """
    if vocab_size < SMALLEST_VOCAB:
        needed = f"256 bytes and {SMALLEST_VOCAB - 256} added tokens need at least {SMALLEST_VOCAB}"
        raise UserError(f"vocab_size = {vocab_size}: too small; {needed}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - SMALLEST_VOCAB + 256,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    added = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *TEXT_TOKENS))))
    backend.train_from_iterator(
        (piece for text in texts for piece in added.split(text) if piece), trainer
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS]
    )
    return Tokenizer(backend)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; a checkpoint directory holds the tokenizer as tokenizer.json"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error})") from None


def _byte_table(vocab: dict[str, int], added: dict[int, AddedToken], source: str) -> list[bytes]:
    """id -> bytes. Byte-level vocabularies spell each byte as one printable character: itself if printable, else from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(rest)
    }
    largest, shared = (
        max(vocab.values()),
        [i for i, count in Counter(vocab.values()).items() if count > 1],
    )
    if largest > LARGEST_ID or shared:
        what = f"id {shared[0]} stands for two tokens" if shared else f"its largest id is {largest}"
        raise UserError(f"{source}: {what}; ids must differ and be at most {LARGEST_ID}")
    table = [b""] * (1 + largest)
    try:
        for token, i in vocab.items():
            table[i] = token.encode() if i in added else bytes(map(spelled.__getitem__, token))
    except KeyError:
        raise UserError(
            f"{source}: token {token!r} is not spelled in bytes; a byte-level BPE (Qwen, GPT-2) is needed"
        ) from None
    return table


def _blocks(paths: Sequence[str]) -> Iterator[str]:
    """UTF-8 files in blocks of about a million characters that end at a line's end. Raises UserError that names the file."""
    for path in paths:
        try:
            with open(path, encoding="utf-8", newline="") as file:
                while block := file.read(1 << 20):
                    yield block + file.readline()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: not UTF-8 text (byte {error.object[error.start]:#04x}); convert it to UTF-8"
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; --input takes readable text files"
            ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status; a user's mistake is one line on stderr and status 1."""
    parser = argparse.ArgumentParser(
        prog="python -m nanorchestra.model.tokenizer",
        description="Train a Qwen-kind byte-level BPE tokenizer.",
    )
    train = parser.add_subparsers(dest="command", required=True).add_parser(
        "train", help="train on text files"
    )
    train.add_argument("--input", nargs="+", required=True, metavar="FILE", help="UTF-8 text files")
    train.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help=f"added tokens included, at least {SMALLEST_VOCAB}",
    )
    train.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="where tokenizer.json and tokenizer_config.json go",
    )
    parser.error = train.error = _refuse_arguments
    arguments = parser.parse_args(argv)
    try:
        if Path(arguments.out).is_file():  # say so before the work, not after
            raise UserError(f"--out {arguments.out}: is a file; a directory is needed")
        tokenizer = train_bpe(_blocks(arguments.input), arguments.vocab_size)
        tokenizer.save(arguments.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    short = (
        ""
        if tokenizer.vocab_size == arguments.vocab_size
        else f" (asked for {arguments.vocab_size}: the input holds no more pairs)"
    )
    print(f"{arguments.out}: {tokenizer.vocab_size} ids{short}")
    return 0


def _refuse_arguments(message: str) -> NoReturn:
    sys.exit(f"error: {message} (--help shows the usage)")


if __name__ == "__main__":
    sys.exit(main())
