"""The pages name files that exist; a script draws their pictures, which are what the code does."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kernels.paged_decode import SharedPrefix, decode_items, rows_per_item, split_bounds
from kernels.paged_prefill import prefill_items
from nanorchestra.engine.block_manager import BlockManager
from nanorchestra.engine.cpu_runner import all_chunks
from nanorchestra.engine.scheduler import Scheduler
from nanorchestra.engine.sequence import Request, SamplingParams, Sequence
from nanorchestra.engine.step_inputs import Capacity, StepInputs, group_by_prefix

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import pictures  # noqa: E402
import walk  # noqa: E402
import walk_run  # noqa: E402


def test_the_script_draws_the_committed_files_byte_for_byte():
    committed = {path.name: path.read_text() for path in pictures.FOLDER.iterdir()}
    assert pictures.draw_all() == committed, "run `python docs/pictures.py`, commit docs/pictures/"


@pytest.mark.slow
def test_the_run_of_the_walk_is_what_the_project_computes():
    """But for rounding, which differs from machine to machine."""
    recorded = json.loads(walk_run.RECORD.read_text())
    assert alike(json.loads(json.dumps(walk_run.record(walk_run.play_group()))), recorded), (
        "run `python docs/walk_run.py` and `python docs/pictures.py`, and read docs/walk.md again"
    )


def alike(found, recorded):
    """Whether two values of JSON are the same, but for the last digits of their numbers."""
    if isinstance(recorded, dict):
        return found.keys() == recorded.keys() and alike(list(found.values()), [*recorded.values()])
    if isinstance(recorded, list):
        return len(found) == len(recorded) and all(map(alike, found, recorded))
    return found == (pytest.approx(recorded, 1e-2, 1e-3) if type(recorded) is float else recorded)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 6))  # the sixth starts a server, which other tests do
def test_a_check_of_the_walk_agrees(number):
    assert walk.CHECKS[number - 1]().agree


def test_a_check_that_is_not_there_is_one_line(capsys):
    assert walk.main(["7"]) == 2
    assert capsys.readouterr().err == "docs/walk.py: there is no check '7'; there are 1 to 6\n"


@pytest.mark.parametrize("name", sorted(path.name for path in pictures.FOLDER.iterdir()))
def test_a_picture_is_legible_in_light_and_dark_and_shown_on_a_page(name):
    text = (pictures.FOLDER / name).read_text()
    root = ElementTree.fromstring(text)
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    used = set()
    for element in root.iter():
        used |= set(element.get("class", "").split())
    coloured = used - {"mono", "edge", "line", "frame"}
    for kind in coloured:
        colour = rf"\.{kind} {{ fill: (#\w+) }}"
        assert re.search(colour, light)[1] != re.search(colour, dark)[1], kind
    assert 'fill="#' not in text, "a colour of its own does not follow the scheme"
    sizes = [float(size) for size in re.findall(r'font-size="(\d+)"', text)]
    if name.startswith("walk-"):  # a phone of 390 px shows it on 358
        assert min(sizes) * 358 / float(root.get("width")) > 11
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert any(f"](pictures/{name})" in page for page in pages)


@pytest.mark.parametrize("name", sorted(path.name for path in pictures.FOLDER.iterdir()))
def test_nothing_runs_past_the_edge_of_a_picture(name):
    root = ElementTree.parse(pictures.FOLDER / name).getroot()
    width = float(root.get("width"))
    for element in root.iter():
        kind = element.tag.rpartition("}")[2]
        if kind == "rect":
            left, size = float(element.get("x", 0)), float(element.get("width"))
        elif kind == "text":
            letter = 0.6 if "mono" in element.get("class") else 0.45  # of the size, about
            size = len(element.text or "") * letter * float(element.get("font-size"))
            share = {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor")]
            left = float(element.get("x")) - share * size
        else:
            continue
        assert left >= 0 and left + size <= width, (kind, element.text, left, size)


def test_the_worked_example_is_what_the_engine_plans():
    example = pictures.EXAMPLE
    requests = {
        name: Request(id=number, sequence=Sequence(list(ids)), params=SamplingParams(), limit=99)
        for number, (name, ids) in enumerate({"A": example.prompt_a, "B": example.prompt_b}.items())
    }
    name_of = {request: name for name, request in requests.items()}
    scheduler = Scheduler(BlockManager(8, example.page_size), max_batch_tokens=64, max_running=8)
    for step, arriving in zip(example.steps, ("A", "B", None), strict=True):
        if arriving is not None:
            scheduler.add(requests[arriving])
        batch = scheduler.schedule()
        rows, tokens, positions, slots = [], [], [], []
        for chunk in all_chunks(batch):
            for position in range(chunk.start, chunk.end):
                page = chunk.request.sequence.block_table[position // example.page_size]
                rows.append(name_of[chunk.request])
                tokens.append(chunk.request.ids[position])
                positions.append(position)
                slots.append(page * example.page_size + position % example.page_size)
        planned = (tuple(rows), tuple(tokens), tuple(positions), tuple(slots))
        assert planned == (step.rows, step.tokens, step.positions, step.slots)

        context_lens = [len(request.ids) for request in batch.decodes]
        assert tuple(context_lens) == step.context_lens
        tables = [
            request.sequence.block_table[: (len(request.ids) - 1) // example.page_size]
            for request in batch.decodes
        ]
        shared = [
            SharedPrefix(members[0], len(members), pages * example.page_size)
            for members, pages in group_by_prefix(tables)
            if pages and len(members) > 1
        ]
        items = decode_items(context_lens, shared, example.split_bounds, rows_per_item(group=4))
        assert tuple(map(tuple, items.tolist())) == step.decode_items
        chunks = batch.prefills
        items = prefill_items([chunk.start for chunk in chunks], [chunk.count for chunk in chunks])
        assert tuple(map(tuple, items.tolist())) == step.prefill_items

        scheduler.commit(batch)
        assert tuple(name_of[request] for request in batch.sampled) == tuple(
            name for name, _ in step.draws
        )
        for name, token in step.draws:
            requests[name].accept(token, logprob=0.0)
    for name, prompt, sampled, block_table in (
        ("A", example.prompt_a, example.sampled_a, example.block_table_a),
        ("B", example.prompt_b, example.sampled_b, example.block_table_b),
    ):
        assert tuple(requests[name].ids) == prompt + sampled
        assert tuple(requests[name].sequence.block_table) == block_table


def test_the_splits_of_the_picture_are_those_of_the_kernel():
    assert pictures.split_bounds(12288) == split_bounds(12288)
    shared = [SharedPrefix(first_row=0, rows=2, keys=300)]
    items = decode_items(pictures.SPLIT_LENGTHS, shared, split_bounds(512), rows_per_item(group=4))
    assert tuple(map(tuple, items.tolist())) == pictures.SPLIT_ITEMS


def test_the_inputs_of_the_picture_are_those_of_the_engine():
    capacity = Capacity(tokens=8, rows=4, splits=2, table_width=2)
    fields = set(vars(StepInputs.allocate(capacity, "meta")))
    for stage in pictures.STEP_STAGES:
        for words in stage.inputs:
            for name in re.findall(r"[a-z_]+_[a-z_]+|tokens|positions|slots|uniform", words):
                assert name in fields, name


@pytest.mark.parametrize("page", ["README.md", "docs/engine.md", "docs/kernels.md", "docs/walk.md"])
def test_a_page_names_only_files_that_exist(page):
    if not (ROOT / ".git").exists():
        pytest.skip("an archive has no list of its files")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = ["/" + name for name in listed.stdout.split()]
    text = (ROOT / page).read_text()
    for name in re.findall(r"`([\w./-]+\.(?:py|c|h))`", text):
        assert any(file.endswith("/" + name) for file in files), name
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (ROOT / page).parent.joinpath(target).exists(), target
