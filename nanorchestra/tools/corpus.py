"""Reads a corpus, cuts it into passages and builds an index of it in a directory, for index.py.

The directory holds a database of the passages with their words, and perhaps their vectors. It is
written aside, and renamed when it is whole. A build that was stopped while it computed vectors goes
on with the next.
"""

import json
import re
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import faiss
import numpy as np
from tqdm import tqdm

from nanorchestra import formats
from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json_lines, read_text, replace_directory
from nanorchestra.schemas import whole_characters
from nanorchestra.tools.embed import Embedder
from nanorchestra.tools.index import Index, Passage, RemoteIndex, VectorIndex, database, insert

# At most 1,000 characters: to the end of the text, else of a paragraph, else of a word.
_CHUNK = re.compile(
    r"\S.{0,999}(?=\Z)|\S.{300,999}(?=\n[ \t]*\n)|\S.{0,999}(?=\s)|\S{1000}", re.DOTALL
)
PASSAGES, VECTORS = "passages.sqlite", "vectors.faiss"
# One row beside the passages: the files they were cut from, the checkpoint that made the vectors.
ABOUT = "CREATE TABLE about (files TEXT, checkpoint TEXT)"
TEXT_FIELDS, SOURCE_FIELDS = ("text", "contents", "content"), ("source", "url", "title", "id")
BLOCK = 32  # passages whose vectors are written together


def build_index(
    source: str | Path, out: str | Path, checkpoint: str | None = None, factory: str | None = None
) -> int:
    """Builds an index of a directory or JSONL file in the directory `out`; returns its passages.

    `checkpoint` is a Qwen3-Embedding, a directory or hub id, whose vectors are indexed; None: the
    words alone are. `factory` is the kind of index, in the words of faiss.index_factory; None:
    "Flat". Raises UserError.
    """
    source, out = Path(source).resolve(), Path(out).resolve()
    require(source.exists(), f"{source}: no such file or directory; give a corpus to index")
    require(not out.is_relative_to(source), f"{out}: --out must not lie in the corpus")
    alone = f"--faiss {factory}: it is the kind of index of vectors; give --embed CHECKPOINT"
    require(checkpoint or not factory, alone)
    known = not out.exists() or (out / PASSAGES).is_file()
    require(known, f"{out}: --out must be new, or an index")
    files = [source] if source.is_file() else sorted(filter(Path.is_file, source.rglob("*")))
    files = [file for file in files if not _is_hidden(file, source)]
    stats = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    aside = out.with_name(f".{out.name}.build")
    try:
        if _about(aside / PASSAGES) != json.dumps(stats):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _write_passages(source, files, stats, aside / PASSAGES)
        if checkpoint:
            _write_vectors(aside, checkpoint, factory or "Flat")
        with replace_directory(out) as new:
            for file in (PASSAGES, VECTORS) if checkpoint else (PASSAGES,):
                (aside / file).rename(new / file)
        shutil.rmtree(aside)
        with closing(database(out / PASSAGES)) as opened:
            return Index(opened).count
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"{out}: cannot be written ({' '.join(str(error).split())})") from None


def open_index(path: str | Path) -> Index | RemoteIndex:
    """Returns the index of a directory, of the rows of a JSONL file, or of a server's address.

    The index of a directory is by vectors if it has any; this thread's GPU, else the CPU, searches
    them and embeds queries. UserError names a directory that is no index, and what is wrong with a
    JSONL file.
    """
    if str(path).startswith(("http://", "https://")):
        return RemoteIndex(str(path))
    path = Path(path)
    if not path.is_dir():
        index = Index.of(_rows(path))
        require(index.count, f'{path}: no passage; it must have lines like {{"text": "..."}}')
        return index
    there = (path / PASSAGES).is_file()
    require(there, f"{path}: no index; build it: python tools.py index PATH --out DIR")
    opened = database(path / PASSAGES)
    if not (path / VECTORS).is_file():
        return Index(opened)
    (checkpoint,) = opened.execute("SELECT checkpoint FROM about").fetchone()
    vectors = faiss.read_index(str(path / VECTORS), faiss.IO_FLAG_MMAP_IFC)
    return VectorIndex(opened, vectors, Embedder(checkpoint))


def _is_hidden(file, source) -> bool:
    """Returns whether a file of a corpus, or a directory above it there, begins with a dot."""
    return any(name.startswith(".") for name in file.relative_to(source).parts)


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


def _about(path) -> str:
    """Returns the files that the passages of a database were cut from, "" if there is none."""
    if not path.is_file():
        return ""
    with closing(database(path)) as opened:
        if not opened.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
            return ""  # the build was stopped before it had committed
        return opened.execute("SELECT files FROM about").fetchone()[0]


def _write_passages(source, files, stats, path) -> None:
    """Writes the passages of a corpus, and what they were cut from, in one transaction."""
    with closing(database(path)) as opened, opened:
        opened.execute("BEGIN")
        opened.execute(ABOUT)
        passages = (
            Passage(text, document.source)
            for document in _documents(source, files)
            for text in _CHUNK.findall(document.text.strip())
        )
        insert(opened, tqdm(passages, desc="cutting", unit="passage", unit_scale=True))
        opened.execute("INSERT INTO about (files) VALUES (?)", (json.dumps(stats),))
        some = Index(opened).count
        require(some, f"{source}: no text to index; a file must be text, or JSONL of {{text}}")


def _write_vectors(out, checkpoint, factory) -> None:
    """Writes the vectors of the passages of a database beside it, as an index of FAISS."""
    there = Path(checkpoint).exists()
    name = str(Path(checkpoint).resolve()) if there else formats.pinned(checkpoint)
    embedder = Embedder(name)
    with _refusals(factory):
        index = faiss.index_factory(embedder.dimension, factory, faiss.METRIC_INNER_PRODUCT)
    with closing(database(out / PASSAGES)) as opened, opened:
        vectors = _embed(opened, embedder, out / f"{quote(name, '')}.float32")
        opened.execute("UPDATE about SET checkpoint = ?", (name,))
    with _refusals(factory):
        index.train(vectors)
        index.add(vectors)
    if lists := faiss.try_extract_index_ivf(index):
        lists.nprobe = max(16, lists.nlist // 64)  # lists that a query visits
    faiss.write_index(index, str(out / VECTORS))


@contextmanager
def _refusals(factory) -> Iterator[None]:
    """Makes what FAISS refuses a UserError; what is wrong stands behind the place in its source."""
    try:
        yield
    except RuntimeError as error:
        problem = " ".join(str(error).split()).rpartition("cpp:")[2].partition(" ")[2]
        right = "give a kind of faiss.index_factory that fits, such as Flat"
        raise UserError(f"--faiss {factory}: {problem[:200]}; {right}") from None


def _embed(opened, embedder, file) -> np.ndarray:
    """Returns the vectors of all passages, float32 [passages, dimension], mapped from a file.

    Those that the file has already are kept.
    """
    count, width = Index(opened).count, 4 * embedder.dimension
    with open(file, "ab") as vectors:
        done = vectors.tell() // width
        vectors.truncate(done * width)
        texts = opened.execute("SELECT text FROM passages WHERE rowid > ? ORDER BY rowid", (done,))
        with tqdm(desc="embedding", total=count, initial=done, unit="passage") as progress:
            while block := texts.fetchmany(BLOCK):
                vectors.write(embedder.passages([text for (text,) in block]).tobytes())
                vectors.flush()
                progress.update(len(block))
    return np.memmap(file, np.float32, "r", shape=(count, embedder.dimension))
