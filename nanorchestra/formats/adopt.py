"""Gives a model of another chat format Qwen3's markers, in place of tokens that it does not use.

    python -m nanorchestra.formats.adopt SOURCE --out DIR
    python -m nanorchestra.formats.adopt SOURCE --out DIR --tokens "<gh_stars>" "<filename>" ...

SOURCE is whatever load_model reads. DIR then is a directory of the same model, which train.py,
serve.py and transformers load. A marker of Qwen3's format that the tokenizer lacks (<tool_call>,
<think>, ...) takes an id that a chat of the source does not need, see `unused_ids`; --tokens names
others. The marker's rows of the embeddings and of an output matrix become the mean of those of the
text that it spells: <tool_call> is near to "tool" and "call" before any training. All other weights
and ids stay as they are. A prompt then begins with <|im_start|>, as Qwen3's does, and no longer
with a token of the source's own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch

from nanorchestra import formats
from nanorchestra.errors import command, require
from nanorchestra.formats.load import load_model
from nanorchestra.model.checkpoint import save_checkpoint, stored_dtype
from nanorchestra.model.qwen3 import Qwen3
from nanorchestra.model.tokenizer import QWEN3, Tokenizer

REQUIRED = QWEN3["required"]
RESERVED = re.compile(r"reserved|unused|extra_id|placeholder", re.IGNORECASE)


def adopt(
    model: Qwen3, tokenizer: Tokenizer, tokens: Sequence[str] = (), source: str = "tokenizer"
) -> tuple[Tokenizer, dict[str, int]]:
    """Returns a tokenizer with all of Qwen3's markers, and the ids of those that are new.

    The model's rows of these ids are overwritten. tokens: added tokens of the tokenizer to rename,
    before those of `unused_ids`. UserError, which names `source`, if there are too few.
    """
    backend = json.loads(tokenizer.backend.to_str())
    present = {token["content"]: token["id"] for token in backend["added_tokens"]}
    lacking = [marker for marker in REQUIRED if marker not in present]
    require(lacking, f"{source}: has all markers of Qwen3's format already")
    for token in tokens:
        known = token in present and token not in REQUIRED
        require(known, f"{source}: --tokens: {token!r} is none of its own added tokens")
    chosen = [present[token] for token in tokens]
    unused = unused_ids(tokenizer, model.config.vocab_size)
    free = list(dict.fromkeys(chosen + unused))
    require(
        len(free) >= len(lacking),
        f"{source}: lacks {', '.join(lacking)}, and has {len(free)} tokens that are not used; name "
        f"{len(lacking)} of its added tokens with --tokens",
    )
    ids = dict(zip(lacking, free, strict=False))

    marker_of = {i: marker for marker, i in ids.items()}
    # In place: the library numbers what it does not find in the vocabulary from its end on.
    vocab = backend["model"]["vocab"].items()
    backend["model"]["vocab"] = {marker_of.get(i, word): i for word, i in vocab}
    added = [token for token in backend["added_tokens"] if token["id"] not in marker_of]
    for marker, i in ids.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added.append({"id": i, "content": marker, "special": marker in QWEN3["special"]} | flags)
    backend["added_tokens"] = sorted(added, key=lambda token: token["id"])
    backend["post_processor"] = None  # it may begin a text with a token of the source

    matrices = [model.embed_tokens.weight]
    if model.lm_head is not None:
        matrices.append(model.lm_head.weight)
    with torch.no_grad():
        for marker, i in ids.items():
            spelt = re.sub(r"[<>|_]+", " ", marker).strip()  # "tool call", "/tool call"
            for matrix in matrices:
                matrix[i] = matrix[tokenizer.encode(spelt)].mean(0)
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(backend)), source), ids


def unused_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Returns the ids that a chat does not need, those that are safest to take first.

    They are tokens that are reserved by their name; rows of the model's vocabulary that the
    tokenizer does not reach; and other special tokens that neither end a turn nor begin a text, nor
    stand in the chat template.
    """
    own = tokenizer.chat
    used = {*tokenizer.eos_ids, *tokenizer.bos_ids}
    reserved, others = [], []
    for i, token in sorted(tokenizer.backend.get_added_tokens_decoder().items()):
        text = token.content
        if i in used or text in (*REQUIRED, own.bos) or text in (own.template or ""):
            continue
        if RESERVED.search(text):
            reserved.append(i)
        elif token.special:
            others.append(i)
    return reserved + list(range(tokenizer.vocab_size, vocab_size)) + others


@command("adopt")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="adopt", description=__doc__, formatter_class=formatter)
    parser.add_argument("source", help="a directory, a .gguf file or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--tokens", nargs="+", default=[], help="added tokens to rename first")
    options = parser.parse_args(arguments)
    require(not options.out.exists(), f"--out {options.out}: it exists; name another one")
    directory = formats.directory_of(options.source)
    model, tokenizer = load_model(directory, dtype=stored_dtype(directory) or "float32")
    require(tokenizer is not None, f"{options.source}: has no tokenizer to give the markers to")
    names = {i: token.content for i, token in tokenizer.backend.get_added_tokens_decoder().items()}
    adopted, ids = adopt(model, tokenizer, options.tokens, options.source)
    save_checkpoint(model, adopted, options.out)
    for marker, i in ids.items():
        print(f"id {i:6d}  {names.get(i, '(no token)'):24} -> {marker}")
    print(f"{options.out}: {options.source} with {len(ids)} markers of Qwen3's format")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
