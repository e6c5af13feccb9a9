"""The pictures of the documentation are what their script draws, and say what the code does."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "pictures.py"
spec = importlib.util.spec_from_file_location("pictures", SCRIPT)
pictures = importlib.util.module_from_spec(spec)
sys.modules["pictures"] = pictures  # dataclasses look their module up
spec.loader.exec_module(pictures)


def test_the_script_draws_the_committed_files_byte_for_byte(tmp_path):
    copy = tmp_path / "pictures.py"
    copy.write_bytes(SCRIPT.read_bytes())
    subprocess.run([sys.executable, str(copy)], check=True)
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "pictures").iterdir()}
    committed = {path.name: path.read_bytes() for path in pictures.FOLDER.iterdir()}
    assert drawn == committed, "run `python docs/pictures.py` and commit docs/pictures/"


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
    pages = [path.read_text() for path in (ROOT / "docs").glob("*.md")]
    assert any(f"](pictures/{name})" in page for page in pages)
