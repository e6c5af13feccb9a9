"""Files are read with messages for the user, and written whole or not at all."""

from __future__ import annotations

import pytest

from nanorchestra.errors import UserError
from nanorchestra.files import read_json, read_json_lines, replace_directory, write_whole


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "a.json"
    for data in ('{"é": [1, null]}', b'{"b": 2}'):
        write_whole(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert read_json(path) == {"b": 2}
    write_whole(path, '1\n\n{"a": "x\u2028y"}\n  \n[3]')
    assert list(read_json_lines(str(path))) == [(1, 1), (3, {"a": "x\u2028y"}), (5, [3])]
    assert list(tmp_path.iterdir()) == [path]  # nothing is left aside


@pytest.mark.parametrize(
    "content, problem",
    [
        (None, "cannot be read"),
        (b'{"a": ', "not JSON"),
        (b"\xff", "UTF-8"),
    ],
)
def test_an_unreadable_file_is_named_in_one_line(tmp_path, content, problem):
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content)
    for read in (read_json, lambda path: list(read_json_lines(path))):
        with pytest.raises(UserError, match=f"data.json.*{problem}"):
            read(path)


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(UserError, match="a.json: cannot be written .No space."):
        write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="cannot be written"):
        write_whole(tmp_path / "missing" / "a.json", "new")


def test_a_directory_is_replaced_by_a_block_that_ends_without_an_error(tmp_path):
    for text in ("old", "new"):
        with replace_directory(tmp_path / "model") as new:
            (new / text).write_text(text)
    with pytest.raises(KeyboardInterrupt), replace_directory(tmp_path / "model"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
