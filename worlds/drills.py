"""Questions that real tools answer, for a first run without a data set.

    python -m worlds.drills docs --out runs/drills
    python -m worlds.drills docs --out runs/drills --expert SmolLM2@http://127.0.0.1:8001/v1

writes questions.jsonl, tools.toml and an index of the corpus. There are products for the
interpreter, sentences of the corpus with a word left out for search, and, with an expert, capitals
for it. Each question states the call that answers it, for a warm start.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from nanorchestra.errors import ArgumentParser, command, require
from nanorchestra.files import write_whole
from nanorchestra.schemas import Json
from nanorchestra.tools.corpus import Passages, build_index

WORDS = range(8, 26)  # of a sentence that is asked
GAP = "____"
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasília",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Colombia": "Bogotá",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "India": "New Delhi",
    "Indonesia": "Jakarta",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Mexico": "Mexico City",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "Vietnam": "Hanoi",
}
TOOLS = """\
[[tools]]
name = "python"
kind = "code"
description = "Runs Python code and returns what it prints."

[[tools]]
name = "manual"
kind = "search"
description = "Finds passages of the manual."
corpus = {corpus}
passages = 2
"""
EXPERT = """
[[tools]]
name = "small"
kind = "expert"
description = "a small language model that knows common facts"
expert = "small"

[experts.small]
endpoint = "small"
model = {model}
usd = [0.1, 0.1]
max_tokens = 64
latency_s = 2.0

[endpoints.small]
base_url = {url}
key_variable = ""
"""


def products(rng: random.Random, count: int) -> Iterator[Json]:
    """Yields questions for the interpreter."""
    for _ in range(count):
        a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
        call = {"tool": "python", "arguments": {"code": f"print({a} * {b})"}}
        yield {
            "question": f"What is {a} * {b}?",
            "answer": str(a * b),
            "kind": "product",
            "calls": [call | {"thought": "A product. I compute it."}],
        }


def gaps(rng: random.Random, texts: list[str], count: int) -> Iterator[Json]:
    """Yields questions for search: sentences of texts without one of their rarest words."""
    seen = Counter(word for text in texts for word in re.findall(r"[A-Za-z]{4,}", text))
    sentences = []
    for text in texts:
        for line in re.split(r"(?<=[.:])\s+", " ".join(text.split())):
            words = line.split()
            if len(words) in WORDS and re.fullmatch(r"[A-Z][A-Za-z ,'-]+\.", line):
                sentences.append(line)
    rng.shuffle(sentences)
    for line in sentences[:count]:
        words = re.findall(r"[A-Za-z]{4,}", line)
        word = min(words[1:] or words, key=lambda word: (seen[word], word))
        asked = re.sub(rf"\b{word}\b", GAP, line)
        query = " ".join(re.sub(rf"\b{word}\b", " ", line).split()[:8])
        call = {"tool": "manual", "arguments": {"query": query}}
        yield {
            "question": f'Which word is missing in the manual: "{asked}"',
            "answer": word,
            "kind": "gap",
            "calls": [call | {"thought": "The manual has the sentence. I search for it."}],
        }


def capitals() -> Iterator[Json]:
    """Yields questions for an expert, which receives them whole."""
    for country, city in CAPITALS.items():
        yield {
            "question": f"What is the capital of {country}?",
            "answer": city,
            "kind": "capital",
            "calls": [{"tool": "small", "thought": "A common fact. I ask the model."}],
        }


def parse(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. UserError if one is wrong."""
    parser = ArgumentParser(prog="worlds.drills", description="Questions that real tools answer.")
    parser.add_argument("corpus", type=Path, help="a directory or a JSON Lines file of texts")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    parser.add_argument("--expert", default="", help="MODEL@URL of an OpenAI-compatible server")
    parser.add_argument("--products", type=int, default=300)
    parser.add_argument("--gaps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


@command("worlds.drills")
def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    options = parse(arguments)
    model, at, url = options.expert.rpartition("@")
    is_url = urlsplit(url).scheme in ("http", "https")
    require(
        not options.expert or at and model and is_url,
        f"--expert is {options.expert!r}; it must be MODEL@URL, like small@http://127.0.0.1:8001/v1",
    )
    rng = random.Random(options.seed)
    index = options.out / "index"
    build_index(options.corpus, index)
    texts = [passage.text for passage in Passages(index)]
    rows = [*products(rng, options.products), *gaps(rng, texts, options.gaps)]
    tools = TOOLS.format(corpus=json.dumps(str(index.resolve())))
    if options.expert:
        rows += capitals()
        tools += EXPERT.format(model=json.dumps(model), url=json.dumps(url))
    rng.shuffle(rows)
    files = {"tools.toml": tools}
    files["questions.jsonl"] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    for name, text in files.items():
        write_whole(options.out / name, text)
    kinds = Counter(row["kind"] for row in rows)
    counted = ", ".join(f"{count} of kind {kind}" for kind, count in sorted(kinds.items()))
    print(f"{options.out}: {' and '.join(files)}: {counted}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
