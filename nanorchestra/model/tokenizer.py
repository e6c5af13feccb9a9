"""Text to ids and back: any byte-level BPE, the training of one of Qwen's kind, UTF-8 streaming.

Two encoders share one BPE model. One knows the added tokens (`<|im_end|>`, `<think>`, ...); the
other does not, so no text from users and tools can forge a marker. Ids become text through a table
of bytes, so a character that is split over several ids is never emitted in part.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from nanorchestra.errors import require
from nanorchestra.files import read_toml, write_whole
from nanorchestra.model.gguf_model import has, read_model_object, read_model_text

QWEN3 = read_toml(Path(__file__).with_name("tokens.toml"))
SPECIAL_TOKENS, TEXT_TOKENS = QWEN3["special"], QWEN3["text"]  # `skip_special` drops the first
ADDED_TOKENS = SPECIAL_TOKENS + TEXT_TOKENS
COMPANIONS = ("tokenizer_config.json", "chat_template.jinja")
# Byte-level BPE spells a byte as one character: itself if printable, else the next from U+0100 on.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_PRINTABLE_FIRST = sorted(range(256), key=lambda byte: chr(byte) not in _ALPHABET)
_BYTES = dict(zip(_ALPHABET, _PRINTABLE_FIRST, strict=True))
_ALPHABET_OF = {byte: c for c, byte in _BYTES.items()}
_ASCII = [*b"\n", *range(0x20, 0x7F)]  # SmolLM2 lacks some bytes beyond
_CACHED = 4096  # entries of the cache of encoded texts, and the most characters of an entry


class Tokenizer:
    """A byte-level BPE tokenizer.

    `vocab_size` is 1 + the largest id; `eos_ids` end a turn, first among them `im_end`. `markers`:
    it has Qwen3's chat and tool tokens, so chat.py writes its prompts. Without them `template` is
    the text of the model's own Jinja template, None if it has none, with the token `bos`.
    `bos_ids` begin a prompt that is text. `backend` also reads markers in text. `source` and
    `template_source` are files, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        source: str = "tokenizer.json",
        template: str | None = None,
        bos: str | None = None,
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        """Takes what tokenizer.json holds; UserError, naming `source`, if it is not byte-level.

        template, bos (the token's text) and eos_ids, first the end of a turn, are those of a
        tokenizer without Qwen3's markers. `bos` begins a prompt if the post-processor adds it.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.source, self.template_source = backend, source, source
        added = backend.get_added_tokens_decoder()  # id -> AddedToken
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._ids = backend.get_vocab(with_added_tokens=True)
        lacking = [chr(byte) for byte in _ASCII if _ALPHABET_OF[byte] not in self._ids]
        require(
            not lacking,
            f"{source}: model.vocab lacks {len(lacking)} bytes of ASCII, such as {lacking[:1]}; "
            "expected a byte-level BPE",
        )
        self.vocab_size = 1 + max(self._ids.values())
        self._bytes = [b""] * self.vocab_size
        for token, i in self._ids.items():
            self._bytes[i] = token.encode() if i in added else bytes(_BYTES[c] for c in token)
        self._plain = _without_added_tokens(backend)
        self.markers = not lacking_markers(backend)
        if self.markers:
            template, bos, config = None, None, QWEN3["config"]
            eos_ids = self.token_id("<|im_end|>"), self.token_id("<|endoftext|>")
        else:
            require(
                eos_ids,
                f"{source}: it has no eos_token; expected tokenizer_config.json beside it to name "
                "the token that ends a turn",
            )
            im_end = self._ids.get("<|im_end|>")
            if im_end in added and im_end not in eos_ids and "<|im_end|>" in (template or ""):
                eos_ids = *eos_ids, im_end  # base models of Qwen2.5 do not name it
            config = QWEN3["config"] | {
                "bos_token": bos,
                "eos_token": self.backend.id_to_token(eos_ids[0]),
                "pad_token": None,
            }
        self.template, self.bos = template, bos
        self.eos_ids, self.im_end = tuple(eos_ids), eos_ids[0]
        processed = backend.encode("").ids
        self.bos_ids = processed[:1] if bos and processed[:1] == [self._ids[bos]] else []
        self._companions = {"tokenizer_config.json": json.dumps(config, indent=2) + "\n"}
        if template is not None:
            self._companions["chat_template.jinja"] = template
        self._cached = lru_cache(_CACHED)(self._encode)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json of a checkpoint, and what `save` will copy beside it.

        Template, bos and eos are those of the files beside it. Raises UserError if it is no
        byte-level BPE, or if no file names the token that ends a turn.
        """
        file = Path(path) / "tokenizer.json"
        data = read_model_object(file)
        is_bpe = data["model"]["type"] == "BPE"
        require(is_bpe, f"{file}: model.type: expected 'BPE', as Qwen's is")
        backend = tokenizers.Tokenizer.from_str(json.dumps(data))
        companions = {}
        for companion in COMPANIONS:
            beside = file.with_name(companion)
            if has(beside):
                companions[companion] = read_model_text(beside)
        settings = {}
        if lacking_markers(backend):
            settings = _chat_settings(file, backend, companions)
        tokenizer = cls(backend, str(file), **settings)
        tokenizer._companions |= companions
        for companion in companions:  # the second has the template, if it is there
            tokenizer.template_source = str(file.with_name(companion))
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

    def require_markers(self, model: str | Path) -> None:
        """Raises UserError unless it has Qwen3's markers; `model`: as the user named it."""
        lacking = ", ".join(lacking_markers(self.backend))
        require(
            self.markers,
            f"{model}: its tokenizer lacks {lacking}: it can chat, but not call tools or be "
            f"trained; python -m nanorchestra.formats.adopt {model} --out DIR gives it the tokens",
        )

    def save(self, path: str | Path) -> None:
        """Writes the files that transformers' AutoTokenizer loads into the directory `path`."""
        Path(path).mkdir(parents=True, exist_ok=True)
        files = {"tokenizer.json": self.backend.to_str(pretty=True) + "\n", **self._companions}
        for name, text in files.items():
            write_whole(Path(path) / name, text)


def lacking_markers(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns Qwen3's chat and tool tokens that are not among the added tokens."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    return [token for token in QWEN3["required"] if token not in added]


def _without_added_tokens(backend) -> tokenizers.Tokenizer:
    """Returns the same BPE without added tokens, so that no text becomes one.

    Some vocabularies hold their added tokens too. Those that text could reach are left out.
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


def _chat_settings(file, backend, companions: Mapping[str, str]) -> dict[str, Any]:
    """Returns `template`, `bos` and `eos_ids` that the files beside tokenizer.json name."""
    config = json.loads(companions.get("tokenizer_config.json", "{}"))
    template = companions.get("chat_template.jinja", config.get("chat_template"))
    if isinstance(template, list):  # of several, by name
        templates = {each.get("name"): each.get("template") for each in template}
        template = templates.get("default")

    def token(field) -> str | None:
        stated = config.get(field)
        return stated.get("content") if isinstance(stated, dict) else stated

    eos, eos_ids = token("eos_token"), []
    if eos is not None:
        eos_ids.append(backend.token_to_id(eos))
    for name in ("generation_config.json", "config.json"):
        beside = file.with_name(name)
        stated = read_model_object(beside).get("eos_token_id") if has(beside) else None
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            eos_ids += [i for i in ids if i not in eos_ids]
            break
    return {"template": template, "bos": token("bos_token"), "eos_ids": eos_ids}


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
