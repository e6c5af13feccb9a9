"""Reads a corpus, cuts it into passages and builds an index of it in a directory, for index.py.

A directory holds index.json (which corpus), the passages, and bm25/ or vectors/. Each part is
written whole, vectors block by block: a build that was stopped goes on where it was. Nothing is
held in memory that grows with the corpus, except the words of BM25 and the codes of IVF-PQ.
"""

import json
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

import bm25s
import numpy as np
from tqdm import tqdm

from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json, read_json_lines, read_text, replace_directory, write_whole
from nanorchestra.model.hub import find
from nanorchestra.schemas import whole_characters
from nanorchestra.tools.devices import device_named
from nanorchestra.tools.embed import Embedder
from nanorchestra.tools.index import Index, Passage, RemoteIndex, VectorIndex, word_index
from nanorchestra.tools.vectors import CODES, VECTORS, Vectors, choose, describe, write_ivfpq

# At most 1,000 characters: to the end of the text, else of a paragraph, else of a word.
_CHUNK = re.compile(
    r"\S.{0,999}(?=\Z)|\S.{300,999}(?=\n[ \t]*\n)|\S.{0,999}(?=\s)|\S{1000}", re.DOTALL
)
MANIFEST = "index.json"
TEXTS, ENDS = "passages.jsonl", "passages.ends"
BY_WORDS, BY_VECTORS = "bm25", "vectors"
SETTINGS = "settings.json"  # of vectors: written last, so that where it is the directory is whole
FORMAT = 2  # of an index directory
TEXT_FIELDS, SOURCE_FIELDS = ("text", "contents", "content"), ("source", "url", "title", "id")
BLOCK = 32  # passages whose vectors are written together
SAME_EMBEDDER = 0.98  # cosine of a passage's vector and the stored one; in bf16 it is above 0.995


class Passages(Sequence[Passage]):
    """The passages of an index directory, read from mapped files as they are asked for.

    A line of TEXTS is the JSON of [text, source]; ENDS has the offset of each line's end, in 8
    bytes.
    """

    def __init__(self, path: Path):
        self._ends = np.memmap(path / ENDS, "<u8", "r")
        with open(path / TEXTS, "rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, row: int) -> Passage:
        if not 0 <= row < len(self):
            raise IndexError(row)
        begin = int(self._ends[row - 1]) if row else 0
        return Passage(*json.loads(self._lines[begin : int(self._ends[row])]))


def build_index(
    source: str | Path, out: str | Path, checkpoint: str | None = None, kind: str | None = None
) -> int:
    """Builds, or goes on building, an index of a directory or JSONL file; returns its passages.

    `checkpoint` is a Qwen3-Embedding, a directory or hub id, whose vectors are indexed; None: the
    words are.
    `kind` is "flat" or "ivfpq"; None: flat for up to 4 GiB of vectors. What is there already is
    kept if the corpus has not changed. Raises UserError.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    require(source.exists(), f"{source}: no such file or directory; give a corpus to index")
    require(not out.is_relative_to(source), f"{out}: --out must not lie in the corpus")
    require(checkpoint or not kind, f"--kind {kind}: vectors have a kind; give --embed CHECKPOINT")
    manifest = out / MANIFEST
    require(not out.exists() or manifest.is_file(), f"{out}: --out must be new, or an index")
    files = [source] if source.is_file() else sorted(filter(Path.is_file, source.rglob("*")))
    files = [file for file in files if not _is_hidden(file, source)]
    stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    corpus = {"format": FORMAT, "files": stats}
    try:
        if not manifest.is_file() or read_json(manifest) != corpus:
            with replace_directory(out) as new:
                _write_passages(source, files, new)
                write_whole(new / MANIFEST, json.dumps(corpus))
        passages = Passages(out)
        if checkpoint:
            source = find(checkpoint)
            name = source.name if source.hub_id else str(source.path.resolve())
            _write_vectors(passages, out, name, kind)
        elif not (out / BY_WORDS).exists():
            with replace_directory(out / BY_WORDS) as new:
                word_index(passage.text for passage in passages).save(new, show_progress=False)
    except (OSError, RuntimeError) as error:  # FAISS raises RuntimeError
        raise UserError(f"{out}: cannot be written ({' '.join(str(error).split())})") from None
    return len(passages)


def open_index(
    path: str | Path, device: str | None = None, checkpoint: str | None = None
) -> Index | RemoteIndex:
    """Returns the index of a directory, of the rows of a JSONL file, or of a server's address.

    The index of a directory is by vectors if it has any. `device` searches them and embeds queries;
    None: this thread's GPU, else the CPU. `checkpoint` is the embedder; None: that of the build.
    UserError names a directory that is no index, and what is wrong with a JSONL file.
    """
    if str(path).startswith(("http://", "https://")):
        return RemoteIndex(str(path))
    if device is not None:
        device_named(device)  # a wrong one is refused, though an index of words needs none
    path = Path(path)
    if not path.is_dir():
        rows = list(_rows(path))
        require(rows, f'{path}: no passage; it must have lines like {{"text": "..."}}')
        return Index(rows)
    vectors, words = path / BY_VECTORS, path / BY_WORDS
    require(
        vectors.is_dir() or words.is_dir(),
        f"{path}: not a whole index; build it: python tools.py index PATH --out DIR",
    )
    passages = Passages(path)
    if vectors.is_dir():
        return _open_vectors(passages, vectors, device, checkpoint)
    return Index(passages, bm25s.BM25.load(words, mmap=True, show_progress=False))


def _open_vectors(passages, path, device, checkpoint) -> VectorIndex:
    settings = read_json(path / SETTINGS)
    vectors = Vectors(path, settings, len(passages), device_named(device))
    embedder = Embedder(checkpoint or settings["checkpoint"], device_named(device))
    _check_embedder(embedder, passages[0].text, vectors.first, path)
    return VectorIndex(passages, vectors, embedder)


def _is_hidden(file, source) -> bool:
    """Returns whether a file of a corpus, or a directory above it there, begins with a dot."""
    return any(name.startswith(".") for name in file.relative_to(source).parts)


def _check_embedder(embedder, text, stored, path) -> None:
    """Raises UserError unless an embedder gives a text nearly its stored vector."""
    again = embedder.passages([text])[0]
    alike = len(again) == len(stored) and float(again @ stored) > SAME_EMBEDDER
    require(
        alike,
        f"{path}: these are the vectors of another embedder than {embedder.checkpoint}; "
        "give theirs with --embed, or delete them and build the index again",
    )


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
        fields = row if isinstance(row, dict) else {}
        text = next((fields[name] for name in TEXT_FIELDS if name in fields), None)
        right = f"one of {', '.join(TEXT_FIELDS)} must be a text"
        require(isinstance(text, str), f"{file}, line {number}: {right}")
        source = next((str(row[name]) for name in SOURCE_FIELDS if name in row), "")
        yield Passage(whole_characters(text), whole_characters(source))


def _write_passages(source, files, out) -> None:
    """Writes the passages of a corpus as lines of [text, source], and where each line ends."""
    end = 0
    with (
        open(out / TEXTS, "wb") as lines,
        open(out / ENDS, "wb") as ends,
        tqdm(desc="cutting", unit="passage", unit_scale=True) as progress,
    ):
        for document in _documents(source, files):
            for text in _CHUNK.findall(document.text.strip()):
                end += lines.write(json.dumps([text, document.source]).encode() + b"\n")
                ends.write(end.to_bytes(8, "little"))
                progress.update()
    require(end, f"{source}: no text to index; a file must be text, or JSONL of {{text}}")


def _write_vectors(passages, out, checkpoint, kind) -> None:
    """Writes the vectors of passages, and their index if it is to be of another kind."""
    place = out / BY_VECTORS
    known = read_json(place / SETTINGS) if (place / SETTINGS).is_file() else {}
    if known.get("checkpoint") != checkpoint:
        file, dimension = _embed(passages, out, checkpoint)
    elif kind in (None, known["kind"]):
        return
    else:
        file, dimension = place / VECTORS, known["dimension"]
    settings = choose(len(passages), dimension, kind)
    print(describe(len(passages), settings))
    vectors = np.memmap(file, np.float32, "r", shape=(len(passages), dimension))
    with replace_directory(place) as new:
        if settings["kind"] == "ivfpq":
            write_ivfpq(vectors, settings, new / CODES)
        os.link(file, new / VECTORS)  # not renamed: a build that is stopped here keeps them
        write_whole(new / SETTINGS, json.dumps({"checkpoint": checkpoint} | settings, indent=1))
    if file.parent == out:
        file.unlink()


def _embed(passages, out, checkpoint) -> tuple[Path, int]:
    """Returns the file of the vectors of passages, and their dimension.

    The blocks of a build that was stopped are kept.
    """
    embedder = Embedder(checkpoint)
    part = out / f"{quote(checkpoint, '')}.part"  # float32 [passages so far, dimension]
    width = 4 * embedder.dimension
    with open(part, "ab") as file:
        begin = file.tell() // width
        file.truncate(begin * width)
        for i in tqdm(range(begin, len(passages), BLOCK), desc="embedding", unit="block"):
            block = range(i, min(i + BLOCK, len(passages)))
            file.write(embedder.passages([passages[row].text for row in block]).tobytes())
            file.flush()
    return part, embedder.dimension
