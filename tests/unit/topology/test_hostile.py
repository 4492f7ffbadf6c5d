"""Small files of fabrics and hosts that are wrong, or that would take for ever, are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpro.errors import InputError
from dpro.topology.nccl_log import read_nccl_logs
from tests.commands import dpro, refused

DEEP = 9500
LONG = 500_000  # characters, on which what takes time with their square takes hours
PRINTED = """Switch 2 "S-1" # "leaf"
[1] "H-1"[1] # "n1 mlx5_0" lid 1 4xHDR
Ca 1 "H-1" # "n1 mlx5_0"
[1] "S-1"[1] # "leaf" lid 1 4xHDR
"""


def _host(device: str) -> str:
    return f"<system><cpu><pci>{device}</pci></cpu></system>"


def _wide(table: str, more: str = "") -> str:
    """Entries of 600,000 names each."""
    return "".join(f"[[{table}]]\nnames='{letter}[1-600000]'\n{more}" for letter in "abcdefgh")


def _line(path: Path, text: str, *options: str | Path, code: int = 1) -> str:
    path.write_text(text)
    line = refused(dpro("topology", *options), code)
    assert len(line) < 300 + len(str(path))
    return line


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a." * DEEP + "a=1", "line 1: a key of more than 64 parts"),
        ("[" + "a." * DEEP + "a]", "line 1: a key of more than 64 parts"),
        ("x={" + "a." * DEEP + "a=1}", "line 1: a key of more than 64 parts"),
        ("a=" + "[" * DEEP, "nested too deep"),
        ("version=" + "9" * 5000, "4300 digits"),
        ("[[hosts]]\nnames='n[" + "1-999999," * 9 + "1]'", "names, of at most 1,000,000"),
        ("[[hosts]]\nnames='" + "n[1-999999]," * 9 + "'", "names, of at most 1,000,000"),
        ("[[hosts]]\nnames='" + "n" * 9999 + "[1-99999]'", "names are too long"),
        ("[[hosts]]\nnames='" + ("n" * 9999 + "[1-5000],") * 9 + "'", "names are too long"),
        (_wide("hosts", "gpus=0\nnics=0\n"), "more than 1,000,000 hosts"),
        ("[[hosts]]\nnames='n'\n" + _wide("switches"), "more than 1,000,000 switches"),
    ],
)
def test_topologies(tmp_path, text, said):
    path = tmp_path / "topology.toml"
    assert said in _line(path, text, path)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("<system>" + "<pci>" * DEEP + "</pci>" * DEEP + "</system>", 1, "nested more than 64 deep"),
        (_host('<gpu dev="0"/><net dev="0"/>' * 3000), 1, "more than 1,024 GPUs or ports"),
        (_host(f'<gpu dev="0" gcn="gfx{"9" * 5000}"><xgmi target="1"/></gpu>'), 2, "has no network port"),
        (_host('<gpu dev="0"/>'), 2, "has no network port"),
        ('<?xml version="1.0" encoding="nosuch"?><system/>', 1, "unknown encoding"),
    ],
)
@pytest.mark.parametrize("made", ["--fat-tree", "--rail-optimised"])
def test_insides_of_hosts(tmp_path, made, text, code, said):
    path = tmp_path / "nccl.xml"
    assert said in _line(path, text, made, "4", "--inside", path, code=code)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PRINTED.replace("[1]", f"[{'9' * 5000}]"), "no link found"),
        (PRINTED.replace("4xHDR", f"{'9' * 400}xHDR"), "no known speed of the link"),
        (PRINTED.replace("4xHDR", f"4xHDR{' ' * LONG}x"), "no known speed of the link"),
    ],
)
def test_outputs_of_ibnetdiscover(tmp_path, text, said):
    path = tmp_path / "fabric.txt"
    assert said in _line(path, text, "--ibnetdiscover", path)


def test_numbers_of_many_digits_in_names_are_names(tmp_path):
    path = tmp_path / "fabric.txt"
    path.write_text(PRINTED.replace("mlx5_0", f"mlx{'9' * 5000}").replace("leaf", f"leaf\u00b2{'9' * 5000}"))
    assert dpro("topology", "--ibnetdiscover", path).returncode == 0


def test_switches_of_slurm(tmp_path):
    path = tmp_path / "topology.conf"
    text = f"SwitchName=s Nodes=n[1-{'9' * 5000}]"
    assert "is neither a number nor a range" in _line(path, text, "--slurm", path, "--gbit", "400")
    assert "does not begin with SwitchName" in _line(path, "a" * LONG, "--slurm", path, "--gbit", "400")


def test_a_file_without_an_end_is_not_read_for_ever():
    assert "is a device" in refused(dpro("topology", "--ibnetdiscover", "/dev/zero"), 1)


def test_lines_of_nccl_of_any_length_take_time_in_proportion(tmp_path):
    path = tmp_path / "job.log"
    begins = "n:1:1 [0] NCCL INFO "
    for text in ("a" * LONG + " NCCL INFO", begins + "comm 0x1 rank 0 nranks 2 " * LONG):
        path.write_text(text)
        with pytest.raises(InputError, match="no rings or trees"):
            read_nccl_logs([path])
