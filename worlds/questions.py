"""Questions with known answers: FRAMES, HLE, GeneralThought, any table of question and answer.

`frames` and `hle` are downloaded as published; `questions:FILE` reads JSON Lines, CSV, TSV and
Parquet.

A training task offers a random subset of a catalogue's tools. Experts have aliases and prices that
change from task to task and stand in a description, as in the paper (arXiv 2511.21689). Held-out
tasks offer the catalogue as it is. The user's preference comes with the row or from the config, by
which it is the same, none, or drawn for each task. A task is a function of split, index and seed.

Experts are the endpoints of the catalogue, or simulations: these know the row's answer and give it
with a probability that grows with the price of the model behind them.
"""

import csv
import hashlib
import io
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Required

from pydantic import StrictFloat, StrictInt
from typing_extensions import TypedDict

from nanorchestra import formats
from nanorchestra.agent.environment import ToolEnvironment
from nanorchestra.agent.tool import Tool, all_ban_names
from nanorchestra.agent.world import Split
from nanorchestra.config import TaskSection
from nanorchestra.errors import UserError, require
from nanorchestra.files import read_json_lines, read_text
from nanorchestra.records import Bounds, Preference, Task
from nanorchestra.schemas import Json, whole_characters
from nanorchestra.tools.models import ExpertTool
from nanorchestra.validation import Text, validated
from worlds import catalogue, preferences
from worlds.judge import grade

PREFIX = "questions:"


class Published(NamedTuple):
    """A benchmark of the Hugging Face hub: its repository, and the file in it."""

    repo: str
    file: str


PUBLISHED = {  # by the word for its world; NAMES has their columns
    "frames": Published("google/frames-benchmark", "test.tsv"),
    "hle": Published("cais/hle", "data/test-00000-of-00001.parquet"),
}
NAMES = {  # of a row's fields in public data sets; other columns are not read
    # FRAMES: Prompt, Answer, reasoning_types
    # HLE: id, question, answer, category, image
    "problem": "question",
    "prompt": "question",
    "reference_answer": "answer",
    "question_id": "id",
    "index": "id",
    "reasoning_types": "kind",
    "category": "kind",
    "task": "kind",
    "pref_vec": "vector",
}
HELD_OUT = "held_out"  # the split of every fifth question, by its hash
EVERY = 5
MISTAKES = 8  # wrong answers that simulated experts choose from
READ = 1500  # tokens that an expert reads in a usual call, for the bounds of a reward


class RowForm(TypedDict, total=False):
    """A row of a file, its fields under the names that are used here; what is else there is not."""

    id: Any
    kind: Any
    question: Required[Text]
    answer: Required[Text | StrictInt | StrictFloat]
    preference: str
    vector: Json


@dataclass(frozen=True)
class QuestionRow:
    """One question. `preference` is in the names of the catalogue; None: the world's."""

    id: str
    question: str
    answer: str
    kind: str
    preference: Preference | None = None


class QuestionEnvironment(ToolEnvironment):
    """One attempt at a question, whose answer `judge` grades."""

    blocking = True
    judge: ExpertTool | None = None

    def score(self, answer: str) -> float:
        """Returns 1.0 if the judge accepts the answer, else 0.0."""
        gold = self.task.data["answer"]
        outcome, self.verdict = grade(self.task.question, gold, answer, self.judge)
        return outcome


@dataclass(frozen=True)
class QuestionWorld:
    """Rows by split ("train", "held_out"), and the catalogue's tools to answer them with.

    `preference` is that of every row without one, None: drawn.
    """

    name: str
    splits: dict[str, list[QuestionRow]]
    tools: Sequence[Tool]
    judge: ExpertTool | None
    seed: int
    simulated: bool
    preference: Preference | None = None

    def size(self, split: Split) -> int:
        """Returns how many questions a split has."""
        return len(self._rows(split))

    def _rows(self, split) -> list[QuestionRow]:
        if split == "all":
            return [*self.splits["train"], *self.splits[HELD_OUT]]
        what = "held out" if split == HELD_OUT else "for training"
        count = sum(map(len, self.splits.values()))
        require(
            self.splits[split],
            f"{self.name}: none of {count} questions is {what}; every fifth by its hash is held "
            "out, and evaluate.py --all plays all",
        )
        return self.splits[split]

    def task(self, split: Split, index: int) -> Task:
        """Returns task `index` of a split, whose rows are taken round and round."""
        rows = self._rows(split)
        row = rows[index % len(rows)]
        if split == "all":
            split = HELD_OUT
        draw = {"seed": f"{self.seed}/{split}/{index}/{row.id}", "varied": split != HELD_OUT}
        rng = random.Random(draw["seed"])
        tools = catalogue.draw(self.tools, rng, draw["varied"])
        preference = row.preference or self.preference
        if preference is None:
            names = [name for tool in tools for name in catalogue.experts_of(tool) or [tool.name]]
            preference = preferences.draw(rng, names, split)
        else:
            preference = self._renamed(preference, tools)
        wrong = {other.answer for other in rng.sample(rows, min(len(rows), MISTAKES))}
        described = [catalogue.row(tool) for tool in tools]
        offers = {}
        for tool in described:
            offers[tool["name"]] = tool["what"]
            for alias, model in tool["models"].items():
                offers[alias] = model["what"]
        data = {
            "answer": row.answer,
            "wrong": sorted(wrong - {row.answer}) or ["unknown"],
            "tools": described,
            "draw": draw,
        }
        return Task(
            f"{row.id}/{split}-{index}",
            row.question,
            preference,
            _bounds(tools),
            self.name,
            row.kind,
            offers,
            data,
        )

    def environment(self, task: Task, seed: int) -> QuestionEnvironment:
        """Returns one attempt at a task; `seed` is that of the simulated experts."""
        tools, draw = self.tools, task.data["draw"]
        if self.simulated:
            tools = [catalogue.simulated(tool, task, seed) for tool in tools]
        offered = catalogue.draw(tools, random.Random(draw["seed"]), draw["varied"])
        env = QuestionEnvironment(task, offered)
        env.judge = self.judge
        return env

    def _renamed(self, preference: Preference, offers: Sequence[Tool]) -> Preference:
        """Returns a preference over the tools on offer, under their aliases, in the words too.

        A model behind several roles has an alias in each; what is not on offer is left out. A ban
        of a kind or an owner stands for all that it reaches.
        """
        aliases = defaultdict(list)
        for tool in offers:
            for alias, expert in catalogue.experts_of(tool).items():
                aliases[expert.offered_as].append(alias)
            if not isinstance(tool, ExpertTool):
                aliases[tool.name].append(tool.name)
        names = "|".join(map(re.escape, sorted(aliases, key=len, reverse=True)))
        pattern = rf"(?<![\w-])({names})(?![\w-])"
        text = re.sub(pattern, lambda match: " or ".join(aliases[match[1]]), preference.text)
        tools = {
            alias: weight for name, weight in preference.tools.items() for alias in aliases[name]
        }
        kept = [ban for ban in preference.never if ban not in catalogue.names_of(self.tools)]
        never = [*catalogue.reached(preference.never, offers), *kept]
        return replace(preference, text=text, tools=tools, never=list(dict.fromkeys(never)))


def _bounds(tools) -> Bounds:
    """Bounds of US dollars and seconds: from nothing to a call of each expert on offer."""
    experts = [expert for tool in tools for expert in catalogue.experts_of(tool).values()]
    usd = sum(expert.price.cost(READ, catalogue.REPLY_TOKENS) for expert in experts)
    seconds = sum(expert.latency_s or catalogue.LATENCY_S for expert in experts)
    return Bounds((0.0, usd or 0.01), (0.0, seconds or catalogue.LATENCY_S))


def load_world(
    name: str, seed: int, settings: TaskSection, tools: Sequence[Tool], judge: ExpertTool | None
) -> QuestionWorld:
    """Opens "questions:FILE", or a published benchmark, with the tools of a catalogue.

    Rows that are no question are left out, which one line on stderr says. UserError if none is
    left, or a preference names no tool.
    """
    require(tools, f"task.world is {name!r}, which needs a catalogue of tools: task.tools")
    preference = preferences.of_setting(settings.preference)
    if preference:
        names = catalogue.names_of(tools), all_ban_names(tools)
        preference.check_names("task.preference", *names)
    file = file_of(name)
    splits = {"train": [], HELD_OUT: []}
    for row in _fitting(load_rows(file), file, tools):
        digest = hashlib.sha256(row.question.encode()).digest()
        splits["train" if int.from_bytes(digest[:4]) % EVERY else HELD_OUT].append(row)
    for split, rows in splits.items():
        random.Random(f"{seed}/{split}").shuffle(rows)
    simulated = settings.experts == "simulated"
    return QuestionWorld(name, splits, tools, judge, seed, simulated, preference)


def _fitting(rows: Sequence[QuestionRow], file: Path, tools: Sequence[Tool]) -> list[QuestionRow]:
    """Returns the rows without weights of tools that the catalogue lacks.

    A line on stderr counts these. UserError for a ban that is wrong.
    """
    names, ban_names = catalogue.names_of(tools), all_ban_names(tools)
    lacking, fitting = Counter(), []
    for row in rows:
        if row.preference is not None:
            weights = row.preference.tools
            lacking.update(weights.keys() - {*names})
            known = {name: weight for name, weight in weights.items() if name in names}
            row = replace(row, preference=preferences.worded(replace(row.preference, tools=known)))
            row.preference.check_names(f"{file}: question {row.id}", names, ban_names)
        fitting.append(row)
    if lacking:
        listed = ", ".join(f"{name} ({times} rows)" for name, times in lacking.most_common(5))
        print(f"{file}: weights of tools that the catalogue lacks: {listed}", file=sys.stderr)
    return fitting


def is_questions(name: str) -> bool:
    """Returns whether a world's name is one of this file's."""
    return name in PUBLISHED or name.startswith(PREFIX)


def file_of(name: str) -> Path:
    """Returns the file of "questions:FILE", or of a published benchmark, once it is downloaded.

    UserError.
    """
    if name not in PUBLISHED:
        return Path(name.removeprefix(PREFIX))
    return formats.data_file(*PUBLISHED[name])


def table_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields (line, row) of a file: JSON Lines, .csv and .tsv with a line of names, or .parquet.

    UserError.
    """
    form = file.suffix.lower()
    if form in (".csv", ".tsv"):
        csv.field_size_limit(sys.maxsize)  # an image is a long text
        lines = io.StringIO(read_text(file).removeprefix("\ufeff"), newline="")
        rows = csv.DictReader(lines, delimiter="\t" if form == ".tsv" else ",", strict=True)
        ended = 1  # line of the last whole row, at first of the names
        try:
            for row in rows:
                yield rows.line_num, {name: text for name, text in row.items() if name}
                ended = rows.line_num
        except csv.Error as error:
            right = 'a " must be closed, and written twice within quotes'
            raise UserError(f"{file}, row from line {ended + 1} on: {error}; {right}") from None
    elif form == ".parquet":
        right = f"{file}: Parquet needs the package pyarrow: pip install pyarrow"
        require(find_spec("pyarrow"), right)
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(file) as batches:
                rows = chain.from_iterable(batch.to_pylist() for batch in batches.iter_batches())
                yield from enumerate(rows, 1)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise UserError(f"{file}: cannot be read as Parquet ({error})") from None
    else:
        yield from read_json_lines(file)


def load_rows(file: Path) -> list[QuestionRow]:
    """Returns the questions of a file; says on stderr how many rows are none, and why the first."""
    rows, problems = [], []
    for number, value in table_rows(file):
        try:
            rows.append(_row(value, file, number))
        except UserError as problem:
            problems.append(str(problem))
    require(rows, problems[0] if problems else f"{file}: the file has no rows")
    if problems:
        count = f"{len(problems)} of {len(rows) + len(problems)} rows are left out"
        print(f"{count}; the first: {problems[0]}", file=sys.stderr)
    return rows


def _row(value, file, number):
    """Returns a row. UserError names line and field."""
    where, known = f"{file}, line {number}", {}
    require(isinstance(value, dict), f"{where}: it must be an object of question and answer")
    for name, field in value.items():
        if field not in (None, "", {}) and field == field:  # NaN: pandas' missing value
            known.setdefault(NAMES.get(name.lower(), name.lower()), field)
    require("image" not in known, f"{where}: the question has an image, which no tool can see")
    used = {name: field for name, field in known.items() if name in RowForm.__annotations__}
    validated(RowForm, used, where)
    text, vector = known.get("preference", ""), known.get("vector", {})
    preference = Preference.of(text, vector, where) if vector or text else None
    return QuestionRow(
        id=str(known.get("id", number)),
        question=whole_characters(known["question"]).strip(),
        answer=whole_characters(str(known["answer"])).strip(),
        kind=str(known.get("kind", file.stem)),
        preference=preference,
    )
