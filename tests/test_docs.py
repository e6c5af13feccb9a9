"""The pages name files that exist, and the checks of the walk agree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import walk  # noqa: E402


@pytest.mark.parametrize("check", walk.CHECKS, ids=lambda check: check.__name__)
def test_a_check_of_the_walk_agrees(check):
    assert check().agree


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
