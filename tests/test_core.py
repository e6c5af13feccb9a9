"""The core runs without what is around it: no door, no tool, no server, no world."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHUT = [f"nanorchestra.{package}" for package in ("formats", "tools", "serving", "report")]
SHUT += ["worlds", "tools"]
PROGRAM = f"""
import runpy, sys

class Shut:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {SHUT}):
            raise ImportError(f"the core imports {{name}}")

sys.meta_path.insert(0, Shut())
runpy.run_path("tests/core_alone.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_core_generates_and_trains_alone():
    """In another process: a package that another test has imported stays importable."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("reward") == 3
