"""Draws the pictures of the documentation as SVG: `python docs/pictures.py`.

A picture is one function, here for docs/engine.md and in walk_pictures.py for docs/walk.md;
drawing.py has what they draw with. The worked example of two requests is data in `EXAMPLE`;
tests/test_docs.py holds it against the engine. The script writes nothing but docs/pictures/*.svg.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import walk_pictures
from drawing import Picture

FOLDER = Path(__file__).with_name("pictures")

# The worked example.


@dataclass(frozen=True)
class ExampleStep:
    """What one step of the worked example computes, in the words of the engine."""

    title: str
    rows: tuple[str, ...]  # whose token each is: "A" or "B"
    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    context_lens: tuple[int, ...]  # of the decoding rows
    decode_items: tuple[tuple[int, int, int], ...]  # (first row, rows, split)
    prefill_items: tuple[tuple[int, int, int, int], ...]  # (sequence, first token, tokens, start)
    draws: tuple[tuple[str, int], ...]  # (request, token)


@dataclass(frozen=True)
class Example:
    """Two requests on pages of four tokens: B comes while A decodes, and begins as A does."""

    page_size: int = 4
    prompt_a: tuple[int, ...] = (11, 12, 13, 14, 15, 16)
    prompt_b: tuple[int, ...] = (11, 12, 13, 14, 21, 22, 23, 24, 25)
    sampled_a: tuple[int, ...] = (17, 18, 19)
    sampled_b: tuple[int, ...] = (26, 27)
    block_table_a: tuple[int, ...] = (0, 1)
    block_table_b: tuple[int, ...] = (0, 2, 3)
    split_bounds: tuple[int, ...] = (0, 4, 8, 12)  # of the picture; the engine's are 0, 128, ...
    steps: tuple[ExampleStep, ...] = (
        ExampleStep(
            title="Step 1: A prefills its prompt",
            rows=("A",) * 6,
            tokens=(11, 12, 13, 14, 15, 16),
            positions=(0, 1, 2, 3, 4, 5),
            slots=(0, 1, 2, 3, 4, 5),
            context_lens=(),
            decode_items=(),
            prefill_items=((0, 0, 6, 0),),
            draws=(("A", 17),),
        ),
        ExampleStep(
            title="Step 2: A decodes; B prefills what is not cached",
            rows=("A",) + ("B",) * 5,
            tokens=(17, 21, 22, 23, 24, 25),
            positions=(6, 4, 5, 6, 7, 8),
            slots=(6, 8, 9, 10, 11, 12),
            context_lens=(7,),
            decode_items=((0, 1, 0), (0, 1, 1)),
            prefill_items=((0, 0, 5, 4),),
            draws=(("A", 18), ("B", 26)),
        ),
        ExampleStep(
            title="Step 3: both decode",
            rows=("A", "B"),
            tokens=(18, 26),
            positions=(7, 9),
            slots=(7, 13),
            context_lens=(8, 10),
            decode_items=((0, 2, 0), (0, 1, 1), (1, 1, 1), (1, 1, 2)),
            prefill_items=(),
            draws=(("A", 19), ("B", 27)),
        ),
    )


EXAMPLE = Example()


def two_requests() -> Picture:
    """The worked example: pages, block tables, and the inputs of three steps."""
    picture = Picture(
        "two-requests",
        920,
        742,
        "Two requests on pages of four tokens: pages, block tables and the inputs of three steps",
    )
    _pool(picture, EXAMPLE)
    y = 300
    for step in EXAMPLE.steps:
        _step(picture, EXAMPLE, step, y)
        y += 154
    return picture


def _pool(picture: Picture, example: Example) -> None:
    """Draws the pages after step 3, and the block tables that name them."""
    ids_a = example.prompt_a + example.sampled_a
    ids_b = example.prompt_b + example.sampled_b
    cell = 40
    left = 30
    picture.text(left, 30, "KV pool after step 3: pages of four positions", 15, bold=True)
    picture.text(
        left, 49, "each cell: the token whose key and value it holds, and its slot", 12, kind="soft"
    )
    written_a = len(ids_a) - 1  # the last token's KV is computed by the next step
    written_b = len(ids_b) - 1
    for page in range(5):
        x = left + page * (4 * cell + 14)
        owners = []
        if page in example.block_table_a:
            owners.append("A")
        if page in example.block_table_b:
            owners.append("B")
        kind = {"": "free", "A": "first", "B": "second", "AB": "both"}["".join(owners)]
        shared = "A and B" if len(owners) == 2 else "".join(owners) or "free"
        picture.text(x, 82, f"page {page}", 13, bold=True)
        picture.text(x + 4 * cell, 82, shared, 12, "end", "soft")
        for offset in range(example.page_size):
            slot = page * example.page_size + offset
            token = ""
            for ids, table, written in (
                (ids_a, example.block_table_a, written_a),
                (ids_b, example.block_table_b, written_b),
            ):
                if page in table:
                    position = table.index(page) * example.page_size + offset
                    if position < written:
                        token = str(ids[position])
            picture.box(x + offset * cell, 90, cell, 34, kind if token else "free")
            picture.text(x + (offset + 0.5) * cell, 112, token, 14, "middle", mono=True)
            picture.text(x + (offset + 0.5) * cell, 139, str(slot), 11, "middle", "soft", mono=True)
    y = 178
    picture.text(left, y, "block tables", 13, bold=True)
    for row, (name, table, ids, written, kind) in enumerate(
        (
            ("A", example.block_table_a, ids_a, written_a, "first"),
            ("B", example.block_table_b, ids_b, written_b, "second"),
        )
    ):
        top = y + 14 + row * 36
        picture.text(left, top + 19, name, 14, bold=True)
        for number, page in enumerate(table):
            picture.label(
                left + 24 + number * 34,
                top,
                34,
                28,
                [str(page)],
                "both" if page == 0 else kind,
                mono=True,
            )
        stored = " ".join(str(token) for token in ids[:written])
        picture.text(
            left + 160,
            top + 19,
            f"{stored}  + {ids[-1]}",
            13,
            mono=True,
        )
    picture.text(left + 160, y, "ids: computed, + the newest, which step 4 computes", 13, bold=True)
    picture.text(560, y, "slot of a position", 13, bold=True)
    picture.text(560, y + 33, "block_table[position // 4] * 4 + position % 4", 12, mono=True)
    picture.text(
        560, y + 69, "B, position 9: block_table[2] * 4 + 1 = 13", 12, mono=True, kind="soft"
    )


def _step(picture: Picture, example: Example, step: ExampleStep, y: int) -> None:
    """Draws the inputs of a step: a column for each token, and what attention works through."""
    left = 30
    cell = 36
    picture.line((left, y - 24), (890, y - 24), arrow=False)
    picture.text(left, y, step.title, 14, bold=True)
    names = {"tokens": step.tokens, "positions": step.positions, "slots": step.slots}
    for row, (name, values) in enumerate(names.items()):
        top = y + 16 + row * 28
        picture.text(left, top + 18, name, 12, mono=True)
        for column, value in enumerate(values):
            kind = "first" if step.rows[column] == "A" else "second"
            picture.label(left + 80 + column * cell, top, cell, 26, [str(value)], kind, mono=True)
    facts = {
        "context_lens": [str(length) for length in step.context_lens],
        "decode items": [str(item) for item in step.decode_items],
        "prefill items": [str(item) for item in step.prefill_items],
        "draws": [f"{name}: {token}" for name, token in step.draws],
    }
    line = y + 34
    for name, values in facts.items():
        picture.text(356, line, name, 12, mono=True, kind="soft")
        for start in range(0, max(len(values), 1), 2):
            picture.text(464, line, ", ".join(values[start : start + 2]) or "none", 12, mono=True)
            line += 20
    _tiles(picture, example, step, 716, y + 24)


def _tiles(picture: Picture, example: Example, step: ExampleStep, left: int, top: int) -> None:
    """Draws which keys each token of a step sees; a frame is an item of work."""
    cell = 14
    keys = max(step.positions) + 1
    picture.text(left - 46, top - 24, "keys that a token sees (frame: an item)", 12, kind="soft")
    for key in range(keys):
        picture.text(
            left + (key + 0.5) * cell, top - 5, str(key), 9, "middle", kind="soft", mono=True
        )
    both_started = "B" in step.rows
    for row, (owner, position) in enumerate(zip(step.rows, step.positions, strict=True)):
        picture.text(left - 8, top + (row + 0.8) * cell, owner, 11, "end", mono=True)
        for key in range(position + 1):
            if both_started and key < example.page_size:
                kind = "both"
            else:
                kind = "first" if owner == "A" else "second"
            picture.box(left + key * cell, top + row * cell, cell, cell, kind, radius=0)
    for first_row, rows, split in step.decode_items:
        start = example.split_bounds[split]
        end = min(example.split_bounds[split + 1], step.positions[first_row] + 1)
        picture.frame(
            left + start * cell, top + first_row * cell, (end - start) * cell, rows * cell
        )
    decodes = len(step.context_lens)
    for _, first_token, tokens, start in step.prefill_items:
        picture.frame(
            left, top + (decodes + first_token) * cell, (start + tokens) * cell, tokens * cell
        )


def request_life() -> Picture:
    """The states of a request, and what a step does to the running ones."""
    picture = Picture("request-life", 920, 400, "The states of a request and the parts of a step")
    picture.text(30, 30, "States of a request", 15, bold=True)
    y, height = 60, 62
    middle = y + height / 2
    states = (
        (30, 130, ("submit", "ids are checked"), "free"),
        (195, 130, ("waiting", "in order of age"), "host"),
        (375, 130, ("running: prefill", "chunks of the prompt"), "first"),
        (540, 130, ("running: decode", "one token a step"), "first"),
        (760, 130, ("finished", "completion"), "both"),
    )
    for x, width, lines, kind in states:
        picture.label(x, y, width, height, list(lines), kind)
    picture.line((160, middle), (193, middle))
    picture.line((325, middle), (373, middle))
    picture.text(348, middle - 8, "pages", 11, "middle", "soft")
    picture.line((505, middle), (538, middle))
    picture.line((670, middle), (758, middle))
    picture.text(713, middle - 22, "stop, length", 11, "middle", "soft")
    picture.text(713, middle - 8, "abort, error", 11, "middle", "soft")
    below = y + height
    picture.line((605, below), (605, below + 26), (285, below + 26), (285, below + 2))
    picture.line((440, below), (440, below + 26), arrow=False)
    picture.text(525, below + 42, "preempted: its pages are given away", 11, "middle", "soft")
    picture.label(
        400, 186, 210, 46, ["session between turns", "its pages stay in its table"], "second"
    )
    picture.line((825, below), (825, 209), (612, 209))
    picture.text(720, 201, "a session's turn", 11, "middle", "soft")
    picture.line((400, 209), (235, 209), (235, below + 2))
    picture.text(318, 201, "the next turn", 11, "middle", "soft")

    picture.text(30, 274, "One step", 15, bold=True)
    parts = (
        (("schedule", "decodes, chunks, pages"), "host"),
        (("launch", "inputs, layers, logits"), "device"),
        (("draw", "noise, guides"), "device"),
        (("read", "tokens, logprobs"), "host"),
        (("commit", "full pages are indexed"), "host"),
        (("accept", "token, end, callback"), "host"),
    )
    width, gap = 128, 18
    for number, (lines, kind) in enumerate(parts):
        x = 30 + number * (width + gap)
        picture.label(x, 292, width, 54, list(lines), kind, size=12)
        if number:
            picture.line((x - gap, 319), (x - 2, 319))
    picture.text(
        30,
        376,
        "On a GPU the next step is launched before this one is read, if it only decodes.",
        12,
        kind="soft",
    )
    return picture


@dataclass(frozen=True)
class Stage:
    """One operation of a step: its name, and what it gives, with the shape at Qwen3-8B."""

    name: str
    gives: str
    example: str = ""
    kind: str = "free"  # "device": a Triton kernel
    inputs: tuple[str, ...] = ()  # of the step's input block


KERNEL = "device"
STEP_STAGES = (
    Stage(
        "embed_tokens",
        "x [T, N]; no residual yet",
        "[448, 4096]",
        inputs=("tokens int32 [T]",),
    ),
    Stage("rotation", "cos and sin, fp32 [T, D / 2]", "[448, 64]", inputs=("positions int32 [T]",)),
    Stage("add_rms_norm", "x and residual [T, N]", "[448, 4096]", KERNEL),
    Stage("qkv_proj", "qkv [T, (H + 2 Hkv) D]", "[448, 6144]"),
    Stage(
        "qk_norm_rope_store",
        "q [T, H, D]; k and v into the pages",
        "[448, 32, 128]",
        KERNEL,
        ("slots int32 [T]",),
    ),
    Stage(
        "decode_attention",
        "out[:B], the decoding rows",
        "[64, 32, 128]",
        KERNEL,
        ("block_tables, context_lens [B]", "decode_items int32 [n, 3]"),
    ),
    Stage(
        "prefill_attention",
        "out[B:], the chunks",
        "[384, 32, 128]",
        KERNEL,
        ("block_tables [chunks, width]", "prefill_items int32 [W, 4]"),
    ),
    Stage("o_proj", "x [T, N]", "[448, 4096]"),
    Stage("add_rms_norm", "x and residual [T, N]", "[448, 4096]", KERNEL),
    Stage("gate_up_proj", "gate and up [T, 2 F]", "[448, 24576]"),
    Stage("swiglu", "[T, F]", "[448, 12288]", KERNEL),
    Stage("down_proj", "x [T, N]", "[448, 4096]"),
    Stage("add_rms_norm", "hidden [T, N]", "[448, 4096]", KERNEL),
    Stage(
        "output matrix",
        "logits fp32 [R, V] of the rows that draw",
        "[65, 151936]",
        inputs=("sampled_token int32 [R]",),
    ),
    Stage(
        "sample",
        "tokens and logprobs [R]",
        "[65]",
        KERNEL,
        ("uniform fp64, temperature,", "top_k, top_p [R]"),
    ),
)
FIRST_OF_LAYER = 2
LAST_OF_LAYER = 11


def step_tensors() -> Picture:
    """The tensors of a mixed step: inputs at the left, operations in the middle, results."""
    picture = Picture(
        "step-tensors", 920, 796, "The tensors of one step of the engine, with their shapes"
    )
    picture.text(
        30, 30, "One step on a GPU: the first B tokens decode, the others are chunks", 15, bold=True
    )
    picture.text(
        30,
        50,
        "T tokens, R rows that draw; sizes of Qwen3-8B, 64 decodes and the last chunk of a prompt, "
        "384 tokens",
        12,
        kind="soft",
    )
    picture.text(30, 78, "the step's input block", 13, bold=True)
    picture.text(350, 78, "operation", 13, bold=True)
    picture.box(434, 67, 14, 14, KERNEL)
    picture.text(454, 78, "Triton kernel", 12, kind="soft")
    picture.text(560, 78, "result", 13, bold=True)
    top = 92
    pitch = 46
    for number, stage in enumerate(STEP_STAGES):
        y = top + number * pitch
        picture.label(350, y, 180, 28, [stage.name], stage.kind, mono=True)
        if number + 1 < len(STEP_STAGES):
            picture.line((440, y + 28), (440, y + pitch - 1))
        picture.text(560, y + 18, stage.gives, 13)
        picture.text(890, y + 18, stage.example, 12, "end", "soft", mono=True)
        if stage.inputs:
            height = 12 + 15 * len(stage.inputs)
            picture.box(30, y + 14 - height / 2, 236, height, "host")
            for line, words in enumerate(stage.inputs):
                picture.text(40, y + 14 - height / 2 + 17 + 15 * line, words, 12, mono=True)
            picture.line((266, y + 14), (348, y + 14))
    frame_top = top + FIRST_OF_LAYER * pitch - 8
    frame_height = (LAST_OF_LAYER - FIRST_OF_LAYER) * pitch + 44
    picture.frame(332, frame_top, 216, frame_height)
    picture.text(322, frame_top + frame_height - 8, "36 layers", 13, "end", bold=True)
    return picture


SPLIT_LENGTHS = (370, 330, 200)  # keys of three rows, of which two share 300
SPLIT_ITEMS = ((0, 2, 0), (0, 2, 1), (2, 1, 0), (0, 1, 2), (1, 1, 2), (2, 1, 1))


def splits() -> Picture:
    """Decode attention: bounds by position, items of work, a grid of fixed size, the merge."""
    picture = Picture(
        "splits", 920, 596, "How decode attention cuts keys into splits, and how it merges them"
    )
    _bounds_by_position(picture, 30)
    _items_of_work(picture, 214)
    _merge(picture, 444)
    return picture


def _bounds_by_position(picture: Picture, y: int) -> None:
    """Draws three rows of different lengths, cut at the same positions."""
    left = 30
    longest = 12288
    scale = 850 / longest  # pixels a key
    picture.text(left, y, "1. Where a row is cut depends on the position alone", 15, bold=True)
    picture.text(
        left,
        y + 20,
        "128 keys a split up to position 2,048, 512 up to 8,192, 2,048 beyond",
        12,
        kind="soft",
    )
    for position, anchor in ((0, "start"), (2048, "middle"), (8192, "middle"), (longest, "end")):
        picture.text(
            left + position * scale, y + 46, f"{position:,}", 11, anchor, "soft", mono=True
        )
    bounds = split_bounds(longest)
    for row, (length, kind) in enumerate(((1000, "first"), (5000, "second"), (8900, "both"))):
        top = y + 54 + row * 32
        count = 0
        for start, end in zip(bounds, bounds[1:], strict=False):
            if start < length:
                width = (min(end, length) - start) * scale
                picture.box(left + start * scale, top, width, 22, kind, radius=1)
                count += 1
        words = f"{length:,} keys: {count} splits"
        picture.text(left + length * scale + 10, top + 16, words, 12)


def _items_of_work(picture: Picture, y: int) -> None:
    """Draws the items of four rows, two of which begin alike, and the programs that take them."""
    left = 30
    width = 118  # of a split
    picture.text(left, y, "2. An item is (first row, rows, split)", 15, bold=True)
    picture.text(
        left,
        y + 20,
        "rows 0 and 1 begin alike for 300 keys: their first two splits are read once",
        12,
        kind="soft",
    )
    shared_splits = 2
    for row, length in enumerate(SPLIT_LENGTHS):
        top = y + 36 + row * 30
        picture.text(left, top + 17, f"row {row}", 12, mono=True)
        for split in range(-(-length // 128)):
            kind = "second" if row == 2 else "first"
            if row < 2 and split < shared_splits:
                kind = "both"
            part = min(1, (length - split * 128) / 128)
            x = left + 60 + split * width
            picture.box(x, top, part * width, 24, kind, radius=1)
            if row >= 2 or split >= shared_splits:
                picture.frame(x, top, part * width, 24)
    for split in range(shared_splits):
        picture.frame(left + 60 + split * width, y + 36, width, 54)
    top = y + 150
    picture.text(left, top + 18, "the list", 12)
    for number, item in enumerate(SPLIT_ITEMS):
        x = left + 60 + number * 100
        picture.label(x, top, 94, 28, [str(item)], "host", mono=True, size=12)
        picture.text(x + 47, top + 46, f"program {number % 4}", 12, "middle", "soft")
    for line, words in enumerate(
        (
            "A grid of fixed size walks items x kv heads.",
            "It reads the length of the list on the device,",
            "so one captured graph serves every list.",
            "(here: one kv head, four programs)",
        )
    ):
        picture.text(540, y + 54 + 18 * line, words, 12, kind="soft")


def _merge(picture: Picture, y: int) -> None:
    """Draws how the results of a row's splits become its output."""
    left = 30
    picture.text(left, y, "3. The merge adds the splits of a row in order", 15, bold=True)
    for number in range(3):
        top = y + 18 + number * 40
        picture.label(left + 60, top, 200, 30, [f"split {number}"], "first", size=12)
        picture.line((left + 260, top + 15), (left + 310, top + 15))
        picture.text(
            left + 318, top + 20, f"lse[{number}], mean value out[{number}]", 12, mono=True
        )
        picture.line((left + 555, top + 15), (left + 600, y + 73))
    picture.label(
        left + 602,
        y + 40,
        258,
        66,
        ["merge", "lse = log sum exp lse[s]", "out = sum exp(lse[s] - lse) out[s]"],
        "device",
        size=13,
    )


@dataclass(frozen=True)
class Stretch:
    """A stretch of time of the host or the GPU, in pixels."""

    start: int
    end: int
    lines: tuple[str, ...]
    kind: str


HOST_TIME = (
    Stretch(90, 180, ("read n - 1", "accept tokens"), "host"),
    Stretch(180, 270, ("draw n", "masks, late draw"), "second"),
    Stretch(270, 346, ("callbacks", "of n - 1"), "host"),
    Stretch(346, 420, ("plan n + 1", "pages"), "host"),
    Stretch(420, 498, ("launch n + 1", "fill inputs"), "both"),
    Stretch(498, 552, ("wait",), "free"),
    Stretch(552, 640, ("read n", "accept tokens"), "host"),
    Stretch(640, 730, ("draw n + 1", "masks, late draw"), "second"),
    Stretch(730, 806, ("callbacks", "of n"), "host"),
    Stretch(806, 890, ("plan n + 2", "pages"), "host"),
)
GPU_TIME = (
    Stretch(90, 420, ("graph of step n", "layers, logits, top-k, top-p, draw"), "device"),
    Stretch(420, 486, ("late draw", "guided rows"), "second"),
    Stretch(486, 562, ("copy out", "draws n"), "both"),
    Stretch(562, 624, ("copy in", "inputs n + 1"), "both"),
    Stretch(624, 890, ("graph of step n + 1", "takes the tokens of n from the device"), "device"),
)


def decode_step() -> Picture:
    """Two decode steps on the host and on the GPU, with the look-ahead between them."""
    picture = Picture(
        "decode-step", 920, 440, "How decode steps overlap on the host and on the GPU"
    )
    picture.text(
        30, 30, "Decode steps n and n + 1: the host works while the GPU computes", 15, bold=True
    )
    picture.text(30, 50, "not to scale; time runs to the right", 12, kind="soft")
    host, device, height = 74, 184, 54
    picture.text(30, host + 31, "host", 13, bold=True)
    picture.text(30, device + 31, "GPU", 13, bold=True)
    for top, stretches in ((host, HOST_TIME), (device, GPU_TIME)):
        for stretch in stretches:
            width = stretch.end - stretch.start
            picture.label(
                stretch.start, top, width, height, list(stretch.lines), stretch.kind, size=11
            )
    below, above = host + height, device - 2
    picture.line((225, below), (225, below + 34), (453, below + 34), (453, above))
    picture.line((458, below), (458, below + 18), (593, below + 18), (593, above))
    picture.line((557, device), (557, below + 2))
    picture.text(30, 276, "A decode-only step is three operations of the host", 15, bold=True)
    rows = (
        (
            "copy in",
            "one block of pinned memory: tokens, positions, slots, context_lens, work items, "
            "noise, block tables",
        ),
        (
            "replay",
            "the graph of the batch size; its kernels read all lengths on the device",
        ),
        ("copy out", "tokens and log-probabilities of all rows, in one block"),
        (
            "guided rows",
            "their masks are copied in, and these rows are drawn again from the graph's logits, "
            "before the next launch",
        ),
    )
    for number, (name, words) in enumerate(rows):
        top = 290 + number * 34
        kind = ("both", "device", "both", "second")[number]
        picture.label(30, top, 100, 26, [name], kind, size=12)
        picture.text(144, top + 17, words, 12)
    return picture


def split_bounds(max_context: int) -> list[int]:
    """Returns the bounds of splits up to max_context, as kernels/paged_decode.py cuts them."""
    bounds = [0]
    while bounds[-1] < max_context:
        start = bounds[-1]
        size = 128 if start < 2048 else 512 if start < 8192 else 2048
        bounds.append(start + size)
    return bounds


def draw_all() -> dict[str, str]:
    """Returns the text of every picture by the name of its file."""
    pictures = [request_life(), two_requests(), step_tensors(), decode_step(), splits()]
    pictures += walk_pictures.draw_walk()
    return {f"{picture.name}.svg": picture.svg() for picture in pictures}


def main() -> None:
    """Writes the pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in draw_all().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
