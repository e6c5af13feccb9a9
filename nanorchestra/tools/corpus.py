"""Reads a corpus, cuts it into passages and builds an index of it in a directory, for index.py.

A directory holds index.json (which corpus), the passages, and bm25/ or vectors/. Each part is
written whole, vectors block by block: a build that was stopped goes on where it was.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import bm25s
import faiss
import numpy as np
from bm25s.utils.corpus import JsonlCorpus
from tqdm import tqdm

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, read_json_lines, read_text, replace_directory, write_whole
from nanorchestra.schemas import check
from nanorchestra.tools.embed import Embedder
from nanorchestra.tools.index import Index, Passage, VectorIndex, word_index

# At most 1,000 characters: to the end of the text, else of a paragraph, else of a word.
_CHUNK = re.compile(
    r"\S.{0,999}(?=\Z)|\S.{300,999}(?=\n[ \t]*\n)|\S.{0,999}(?=\s)|\S{1000}", re.DOTALL
)
TEXTS, WORDS, VECTORS = "passages.jsonl", "bm25", "vectors"
TEXT_FIELDS, SOURCE_FIELDS = ("text", "contents", "content"), ("source", "url", "title", "id")
BLOCK = 32  # passages whose vectors are written together


def build_index(source: str | Path, out: str | Path, checkpoint: str | None = None) -> int:
    """Builds, or goes on building, an index of a directory or JSONL file; returns its passages.

    `checkpoint` is a Qwen3-Embedding directory, whose vectors are indexed; None: the words are.
    What is there already is kept if the corpus has not changed. Raises UserError.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    require(source.exists(), f"{source}: no such file or directory; give a corpus to index")
    require(not out.is_relative_to(source), f"{out}: --out must not lie in the corpus")
    manifest = out / "index.json"
    require(not out.exists() or manifest.is_file(), f"{out}: --out must be new, or an index")
    files = [source] if source.is_file() else sorted(filter(Path.is_file, source.rglob("*")))
    files = [f for f in files if not any(p[0] == "." for p in f.relative_to(source).parts)]
    stats = [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    try:
        if not manifest.is_file() or read_json(manifest) != stats:
            with replace_directory(out) as new:
                _write_passages(source, files, new)
                write_whole(new / manifest.name, json.dumps(stats))
        passages = _saved_passages(out)
        if checkpoint:
            _write_vectors(passages, out, str(Path(checkpoint).resolve()))
        elif not (out / WORDS).exists():
            with replace_directory(out / WORDS) as new:
                word_index(text for text, _ in passages).save(new, show_progress=False)
    except (OSError, RuntimeError) as error:  # FAISS raises RuntimeError
        raise UserError(f"{out}: cannot be written ({error})") from None
    return len(passages)


def open_index(path: str | Path) -> Index:
    """Returns a built index, by vectors if it has any, or that of a JSONL file, made in memory.

    A row of the file is a passage. UserError names file, line and field.
    """
    path = Path(path)
    if not path.is_dir():
        rows = list(_rows(path))
        require(rows, f'{path}: no passage; it must have lines like {{"text": "..."}}')
        return Index(rows)
    vectors, words = path / VECTORS, path / WORDS
    require(
        vectors.is_dir() or words.is_dir(),
        f"{path}: not a whole index; build it: python tools.py index PATH --out DIR",
    )
    passages = _saved_passages(path)
    if vectors.is_dir():
        return VectorIndex(passages, vectors)
    return Index(passages, bm25s.BM25.load(words, mmap=True, show_progress=False))


def _saved_passages(path) -> JsonlCorpus:
    """Returns the passages of an index directory as [text, source], read from the mapped file."""
    return JsonlCorpus(path / TEXTS, show_progress=False)


def _documents(source, files) -> Iterator[Passage]:
    """Yields rows of JSONL files and whole other files; what is not text is named and left out."""
    for file in files:
        if file.suffix == ".jsonl":
            yield from _rows(file)
            continue
        try:
            name = file.name if file == source else str(file.relative_to(source))
            yield Passage(read_text(file), name)
        except UserError as error:
            print(f"left out: {error}", file=sys.stderr)


def _rows(file) -> Iterator[Passage]:
    for number, row in read_json_lines(file):
        check(row, "passage", f"{file}, line {number}")
        text = next(row[name] for name in TEXT_FIELDS if name in row)
        yield Passage(text, next((str(row[name]) for name in SOURCE_FIELDS if name in row), ""))


def _write_passages(source, files, out):
    """Writes the passages of a corpus as lines of [text, source]."""
    with open(out / TEXTS, "w", encoding="utf-8") as lines:
        for document in _documents(source, files):
            for text in _CHUNK.findall(document.text.strip()):
                lines.write(json.dumps([text, document.source]) + "\n")
    found = _saved_passages(out)  # writes where each line begins
    require(found, f"{source}: no text to index; a file must be text, or JSONL of {{text}}")


def _write_vectors(passages, out, checkpoint):
    """Writes the vectors of passages; the blocks of a build that was stopped are kept."""
    settings = {"checkpoint": checkpoint}
    done = out / VECTORS / "settings.json"
    if done.is_file() and read_json(done) == settings:
        return
    embedder = Embedder(checkpoint)
    part = out / f"{quote(checkpoint, '')}.part"  # float32 [passages so far, dimension]
    with open(part, "ab") as file:
        begin = file.tell() // (width := 4 * embedder.dimension)
        file.truncate(begin * width)
        for i in tqdm(range(begin, len(passages), BLOCK), desc="embedding", unit="block"):
            texts = [text for text, _ in passages[i : i + BLOCK]]
            file.write(embedder.passages(texts).tobytes())
            file.flush()
    index = faiss.IndexFlatIP(embedder.dimension)
    index.add(np.memmap(part, np.float32, "r").reshape(-1, embedder.dimension))
    with replace_directory(out / VECTORS) as new:
        faiss.write_index(index, str(new / "flat.faiss"))
        write_whole(new / done.name, json.dumps(settings))
    part.unlink()
