"""The parts of benchmarks/gpu.py: each is a function of a `Part`, and notes its figures there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock


class NotHereError(Exception):
    """A part cannot run on this machine: a library is not installed, the memory is too small."""


@dataclass
class Part:
    """The argument of a part: where it runs, and where its figures go.

    `figures` are written to `file` at each `note`, so that what was measured outlives a fault.
    """

    rehearse: bool
    file: Path | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device of the part."""
        return "cpu" if self.rehearse else "cuda"

    def note(self, name: str, **values: Any) -> None:
        """Records and prints figures."""
        self.figures[name] = values
        figures = [f"{key} {_formatted(value)}" for key, value in values.items()]
        print(f"  {name:44} {', '.join(figures)}", flush=True)
        if self.file is not None:
            write(self.file, self.figures)


@contextmanager
def by_kernels(part: Part) -> Iterator[None]:
    """Lets the kernels compute in the rehearsal too: in Triton's interpreter, on CPU tensors."""
    # gpu.py imports this file before it knows that torch is installed.
    from nanorchestra.model import ops

    with ExitStack() as patches:
        if part.rehearse:
            patches.enter_context(mock.patch.object(ops, "by_kernel", lambda x: True))
            # A packed model is computed by C.
            patches.enter_context(mock.patch("nanorchestra.training.build.pack"))
        yield


def _formatted(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write(file: Path, data: Any) -> None:
    """Writes JSON whole: aside first, then renamed."""
    aside = file.with_suffix(".part")
    aside.write_text(json.dumps(data, indent=1) + "\n")
    aside.replace(file)
