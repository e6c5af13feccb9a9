"""Makes tokenizer.json and its settings of the metadata in a GGUF file.

The metadata has the tokens in the order of their ids, their types, the merges, and a name for how
text is cut before them: `pre_tokenizers.toml` says what each name stands for.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from nanorchestra.files import read_toml
from nanorchestra.model.gguf_file import GgufFile

_NORMAL, _USER_DEFINED, _UNUSED, _BYTE = 1, 4, 5, 6  # values of tokenizer.ggml.token_type
_IN_TEXT = _NORMAL, _UNUSED, _BYTE  # no added token
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
_ENDING = "eos", "eot", "eom"
_ENDS = "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>"  # end a turn where they exist

# tokenizer.ggml.pre -> how text is cut before the merges
PRE_TOKENIZERS = {
    name: kind
    for kind in read_toml(Path(__file__).with_name("pre_tokenizers.toml")).values()
    for name in kind["names"]
}


class GgufTokenizer:
    """The tokenizer in a GGUF file, as the files of a Hugging Face directory. UserError."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._metadata = file, file.metadata
        kind = self._metadata.get("tokenizer.ggml.model", "none")
        self.exists = kind not in ("none", "no_vocab")

    @cached_property
    def _tokens(self) -> tuple[list[str], list[int]]:
        """Returns the token and its type by id."""
        tokens = self._metadata["tokenizer.ggml.tokens"]
        types = self._metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        return tokens, types

    def tokenizer(self) -> dict[str, Any]:
        """Returns tokenizer.json of the kind "gpt2", a byte-level BPE."""
        kind = self._metadata["tokenizer.ggml.model"]
        expected = "'gpt2', a byte-level BPE; give the directory that the file was converted from"
        self._file.check(kind == "gpt2", "tokenizer.ggml.model", expected)
        pre = self._pre_tokenizer()
        tokens, types = self._tokens
        pairs = [merge.split(" ") for merge in self._metadata["tokenizer.ggml.merges"]]
        added = [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": types[i] != _USER_DEFINED,
            }
            for i, token in enumerate(tokens)
            if types[i] not in _IN_TEXT
        ]
        splits = [
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
            for pattern in pre["patterns"]
        ]
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        bos = self._special_tokens().get("bos_token")
        puts_bos = bos is not None and self._adds_bos(pre)
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": {"type": "NFC"} if pre.get("nfc") else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
            "post_processor": _after_bos(bos, tokens) if puts_bos else byte_level,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": pre.get("ignore_merges", False),
                "vocab": {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED},
                "merges": pairs,
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """Returns tokenizer_config.json, with the chat template."""
        fields = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds_bos(self._pre_tokenizer()),
            **self._special_tokens(),
        }
        template = self._metadata.get("tokenizer.chat_template")
        if template is not None:
            fields["chat_template"] = template
        return fields

    def ending_ids(self) -> list[int]:
        """Returns the ids that llama.cpp ends a turn at: those stated, and those of known texts."""
        tokens, types = self._tokens
        ids = [self._metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDING]
        added = {token: i for i, token in enumerate(tokens) if types[i] not in _IN_TEXT}
        ids += [added.get(token) for token in _ENDS]
        return list(dict.fromkeys(i for i in ids if i is not None))

    def _pre_tokenizer(self) -> dict[str, Any]:
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        known = ", ".join(PRE_TOKENIZERS)
        self._file.check(name in PRE_TOKENIZERS, "tokenizer.ggml.pre", f"one of {known}")
        return PRE_TOKENIZERS[name]

    def _adds_bos(self, pre) -> bool:
        return bool(self._metadata.get("tokenizer.ggml.add_bos_token", pre.get("add_bos", False)))

    def _special_tokens(self) -> dict[str, str]:
        """Returns bos_token, eos_token and pad_token, as far as they are stated."""
        tokens, _ = self._tokens
        named = {}
        for field, key in _SPECIAL.items():
            i = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
            if i is not None:
                named[field] = tokens[i]
        return named


def _after_bos(bos, tokens) -> dict[str, Any]:
    """Returns the post-processor that puts the token `bos` before a text, for transformers."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, second],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }
