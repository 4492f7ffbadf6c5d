"""`paths.json`: what is written comes back, and what is wrong is refused with the place."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import InputError
from dpro.topology.kept import PathEntry, read_paths, write_paths

ENTRIES = [PathEntry("a:nic0", "b:nic1", ["x > y"], 1, 5), PathEntry("a:nic0", "b:nic0", [])]


def test_paths_that_are_written_come_back(tmp_path: Path) -> None:
    write_paths(ENTRIES, tmp_path / "paths.json")
    assert read_paths(tmp_path / "paths.json") == ENTRIES


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"version": 2}', "version 2 is not known"),
        ('{"paths": [{"from": "a:nic0", "to": "b:nic0"}]}', "links"),
        ('{"paths": [{"from": "a", "to": "b", "links": [1]}]}', "Expected `str`, got `int`"),
        ('{"paths": ', "truncated"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "paths.json").write_text(text)
    with pytest.raises(InputError, match=says):
        read_paths(tmp_path / "paths.json")
    with pytest.raises(InputError, match="No such file"):
        read_paths(tmp_path / "none.json")
