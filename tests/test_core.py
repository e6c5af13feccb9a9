"""The core runs without what is around it: no door, no tool, no server, no world."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import runpy, sys

class Shut:
    around = "nanorchestra.formats nanorchestra.tools nanorchestra.serving nanorchestra.report"

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{each}.") for each in f"{self.around} worlds tools".split()):
            raise ImportError(f"the core imports {name}")

sys.meta_path.insert(0, Shut())
runpy.run_path("tests/core_alone.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_core_generates_and_trains_alone():
    """In another process: a package that another test has imported stays importable."""
    run = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(run, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reward") == 3
