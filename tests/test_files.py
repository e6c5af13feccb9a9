"""Files are read with messages for the user, and written whole or not at all.

test_counted_faults.py has what happens where a write fails or the process is killed.
"""

from __future__ import annotations

import pytest

from nanorchestra.files import read_json, read_json_lines, replace_directory, write_whole


def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "a.json"
    write_whole(path, '{"é": [1, null]}')
    assert read_json(path) == {"é": [1, None]}
    write_whole(path, '1\n\n{"a": "x\u2028y"}\n  \n[3]'.encode())
    assert list(read_json_lines(str(path))) == [(1, 1), (3, {"a": "x\u2028y"}), (5, [3])]
    assert list(tmp_path.iterdir()) == [path]  # nothing is left aside


def test_a_directory_is_replaced_by_a_block_that_ends_without_an_error(tmp_path):
    for text in ("old", "new"):
        with replace_directory(tmp_path / "model") as new:
            (new / text).write_text(text)
    with pytest.raises(KeyboardInterrupt), replace_directory(tmp_path / "model"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
