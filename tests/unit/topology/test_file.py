"""`topology.toml`: what is wrong is named with its entry; what is written is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import InputError
from dpro.extensions.fabric.fabrics import FabricSize, rail_optimised
from dpro.topology.file import as_toml, cables, read, write

GOOD = """
version = 1
[[hosts]]
names = "node[0-1]"
gpus = 2
nics = 1
[[switches]]
names = "leaf0"
[[links]]
from = "node[0-1]:nic0"
to = "leaf0"
gbit = 100
"""


def _read(tmp_path: Path, text: str) -> str:
    """What is wrong with a file."""
    path = tmp_path / "topology.toml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(path) in str(error.value)
    return str(error.value)


def test_a_small_fabric_is_read(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(GOOD)
    assert [tuple(each) for each in cables(read(path))] == [
        ("node0:nic0", "leaf0", 100.0, 1),
        ("node1:nic0", "leaf0", 100.0, 1),
    ]


def test_a_binary_file_is_said_to_be_no_text(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_bytes(b"\x80\x00PAR1")
    with pytest.raises(InputError, match=r"topology\.toml: is not text"):
        read(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("version = 1", "version = 2"), "version 2"),
        (("gbit = 100", 'gbit = "fast"'), "links[0].gbit"),
        (("gbit = 100", "gbit = 0"), "links[0]: gbit"),
        (("gbit = 100", "speed = 100"), "speed"),
        (("gbit = 100", 'connect = "some"'), "links[0]: connect"),
        (("gbit = 100", 'connect = "each"'), "2 ends are linked each to one of 1"),
        (('to = "leaf0"', 'to = "leaf9"'), "links[0]: no switch 'leaf9': there are leaf0"),
        (("node[0-1]:nic0", "node[0-1]:nic7"), "no port 'node"),
        (("node[0-1]:nic0", "node[0-1]"), "is a host: name its port"),
        (("node[0-1]:nic0", "node[0-1:nic0"), "links[0]: 'node[0-1:nic0': brackets"),
        (("gpus = 2", "gpus = 2\nnear = [0]"), "hosts[0]: near names 1 ports"),
        (("gpus = 2", "gpus = 2\nnear = [0, 1]"), "hosts[0]: near names ports from 0 to 0"),
        (('names = "leaf0"', 'names = "leaf0,leaf0"'), "switch 'leaf0' is described twice"),
        (('names = "leaf0"', 'names = "node0"'), "'node0' is a host and a switch"),
        (("names = \"node[0-1]\"", 'names = ""'), "hosts[0]: names is empty"),
        (('to = "leaf0"', 'to = "leaf0,leaf0"'), "linked 2 times"),
        (("[[links]]", "[[links]"), "topology.toml"),
        (("gbit = 100", "gbit = nan"), "links[0]: gbit"),
        (("gbit = 100", "gbit = inf"), "links[0]: gbit"),
        (("gbit = 100", "count = 999999999"), "links[0]: more than 4,000,000 cables"),
        (("gpus = 2", "gpu_gbps = nan"), "hosts[0]: counts"),
        (("gpus = 2", "gpus = 99999999999"), "more than 1,000,000 hosts, GPUs and ports"),
        (("nics = 1", "nics = 999999999"), "more than 1,000,000 hosts, GPUs and ports"),
        (("node[0-1]\"\ngpus", "node[0-999999]\"\ngpus"), "more than 1,000,000 hosts, GPUs and ports"),
        ((GOOD, ""), "describes no host"),
    ],
)  # fmt: skip
def test_an_entry_that_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    assert change[0] in GOOD
    assert says in _read(tmp_path, GOOD.replace(*change))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read(tmp_path / "none.toml")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        write(rail_optimised(FabricSize(2, gpus=1, nics=1, ports=4)), tmp_path / "none" / "topology.toml")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    made = rail_optimised(FabricSize(6, gpus=4, nics=2, ports=4))
    write(made, tmp_path / "topology.toml")
    assert read(tmp_path / "topology.toml") == made
    assert as_toml(made).count("[[links]]") == len(made.links)
