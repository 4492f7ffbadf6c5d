"""What NCCL, Slurm and `ibnetdiscover` say of a fabric."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpro.errors import InputError
from dpro.extensions.fabric.importers import read_ibnetdiscover, read_inside, read_slurm
from dpro.topology.file import HostEntry, cables

HOST = HostEntry("host", gpus=2, nics=2)
PCI = '<pci busid="{bus}" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">{inner}</pci>'
GPU = '<pci busid="{bus}" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16"><gpu dev="{dev}" sm="90">{nvlink}</gpu></pci>'  # noqa: E501
NET = '<pci busid="{bus}" class="0x020000"><nic><net name="mlx5_{dev}" dev="{dev}" speed="400000" port="1"/></nic></pci>'  # noqa: E501
NVLINK = '<nvlink target="0000:00:00.0" count="18" tclass="0x068000"/>'


def _system(nvlink: str = NVLINK) -> str:
    """A host of four GPUs and two ports: those of a PCI switch belong together, numbered the other way."""
    switches = [
        PCI.format(
            bus=f"{at}0",
            inner=NET.format(bus=f"{at}3", dev=1 - at)
            + "".join(GPU.format(bus=f"{at}{gpu}", dev=2 * at + gpu, nvlink=nvlink) for gpu in (0, 1)),
        )
        for at in (0, 1)
    ]
    return f'<system version="1"><cpu numaid="0">{"".join(switches)}</cpu></system>'


def test_the_inside_of_a_host_is_read_from_nccls_file(tmp_path: Path) -> None:
    (tmp_path / "nccl.xml").write_text(_system())
    found = read_inside(tmp_path / "nccl.xml", "node[1-4]")
    assert (found.names, found.gpus, found.nics, found.nic_gbit) == ("node[1-4]", 4, 2, 400.0)
    assert found.gpu_gbps == 18 * 25  # NVLinks of an H100
    assert found.near == [1, 1, 0, 0]


def test_gpus_without_nvlink_send_over_pci(tmp_path: Path) -> None:
    (tmp_path / "nccl.xml").write_text(_system(nvlink=""))
    assert read_inside(tmp_path / "nccl.xml", "n").gpu_gbps == pytest.approx(16 * 3.94)


SLURM = """
# a comment
SwitchName=leaf1 Nodes=node[1-2] LinkSpeed=100
SwitchName=leaf2 \\
  Nodes=node3,node4
SwitchName=top Switches=leaf[1-2]
"""


def test_slurms_tree_becomes_tiers(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(SLURM)
    found = read_slurm(tmp_path / "topology.conf", 200.0, HOST)
    assert [(each.names, each.tier) for each in found.switches] == [("leaf[1-2]", "leaf"), ("top", "spine")]
    assert [host.names for host in found.hosts] == ["node[1-4]"]
    ends = {(cable.begin, cable.end) for cable in cables(found)}
    assert {("node1:nic0", "leaf1"), ("node4:nic1", "leaf2"), ("leaf2", "top")} <= ends
    assert len(ends) == 4 * 2 + 2
    assert {cable.gbit for cable in cables(found)} == {200.0}


SWITCH = """
vendid=0x2c9
switchguid=0x{guid}(b1)
Switch\t41 "S-{guid}"\t\t# "MF0;{name}:MQM8700/U1" enhanced port 0 lid 3 lmc 0
"""


def _fabric() -> str:
    """Two leaves with one host each, of two ports, and two cables from each leaf to a spine."""
    spine = SWITCH.format(guid="c0", name="top") + "".join(
        f'[{port}]\t"S-a{leaf}"[{8 + at}]\t\t# "MF0;leaf{leaf}:MQM8700/U1" lid 5 4xHDR\n'
        for port, (leaf, at) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)], 1)
    )
    leaves = "".join(
        SWITCH.format(guid=f"a{leaf}", name=f"leaf{leaf}")
        + "".join(
            f'[{port}]\t"H-f{leaf}{port}"[1](f{leaf}{port}) \t\t# "node{leaf} mlx5_{port}" lid 4 4xNDR\n'
            for port in (1, 2)
        )
        + "".join(
            f'[{8 + at}]\t"S-c0"[{2 * leaf - 1 + at}]\t\t# "MF0;top:MQM8700/U1" lid 9 4xHDR\n'
            for at in (0, 1)
        )
        for leaf in (1, 2)
    )
    hosts = "".join(
        f'\ncaguid=0xf{leaf}{port}\nCa\t1 "H-f{leaf}{port}"\t\t# "node{leaf} mlx5_{port}"\n'
        f'[1](f{leaf}{port}) \t"S-a{leaf}"[{port}]\t\t# lid 4 lmc 0 "MF0;leaf{leaf}" lid 3 4xNDR\n'
        for leaf in (1, 2)
        for port in (1, 2)
    )
    return f"#\n# Topology file: generated on Mon Nov 2\n#\n{spine}{leaves}{hosts}"


def test_an_infiniband_fabric_is_read(tmp_path: Path) -> None:
    (tmp_path / "fabric.txt").write_text(_fabric())
    found = read_ibnetdiscover(tmp_path / "fabric.txt", HOST)
    assert [(each.names, each.tier) for each in found.switches] == [("leaf[1-2]", "leaf"), ("top", "spine")]
    assert [(host.names, host.nics, host.nic_gbit) for host in found.hosts] == [("node[1-2]", 2, 400.0)]
    assert {tuple(cable) for cable in cables(found)} == {
        ("leaf1", "top", 200.0, 2),
        ("leaf2", "top", 200.0, 2),
        *((f"node{leaf}:nic{port}", f"leaf{leaf}", 400.0, 1) for leaf in (1, 2) for port in (0, 1)),
    }


def test_adapters_that_only_say_their_model_are_hosts_of_their_own(tmp_path: Path) -> None:
    """As old fabrics print them: two adapters described by the same words, and no speed behind a link."""
    switch = 'Switch\t24 "S-b1"\t\t# "ISR9024 Switch" base port 0 lid 6 lmc 0\n'
    ports = "".join(f'[{at}]\t"H-f{at}"[1](f{at}a)\t\t# "MT25208 Adapter" lid {at}\n' for at in (1, 2))
    own = "".join(
        f'\nCa\t2 "H-f{at}"\t\t# "MT25208 Adapter"\n'
        f'[1](f{at}a)\t"S-b1"[{at}]\t\t# lid {at} lmc 0 "ISR9024 Switch" lid 6\n'
        for at in (1, 2)
    )
    (tmp_path / "fabric.txt").write_text(switch + ports + own)
    found = read_ibnetdiscover(tmp_path / "fabric.txt", HOST, gbit=10.0)
    assert {tuple(cable) for cable in cables(found)} == {
        ("H-f1:nic0", "ISR9024-Switch", 10.0, 1),
        ("H-f2:nic0", "ISR9024-Switch", 10.0, 1),
    }
    with pytest.raises(InputError, match="give one with --gbit"):
        read_ibnetdiscover(tmp_path / "fabric.txt", HOST)


def test_parts_of_chassis_lines_and_one_port_of_two_that_is_used_are_read(tmp_path: Path) -> None:
    """Headings, external ports in brackets, and a host with one adapter of two ports."""
    text = (
        "Non-Chassis Nodes\n\nChassis 0\n"
        'Switch\t8 "S-b1"\t\t# "edge" base port 0 lid 1 lmc 0\n'
        '[1]\t"H-f1"[2](f1b)\t\t# "login HCA-1" lid 2 2xHDR\n'
        '[3][ext 3]\t"S-b2"[4]\t\t# "core" lid 5 4xFDR10\n'
        '\nSwitch\t8 "S-b2"\t\t# "core" base port 0 lid 5 lmc 0\n'
        '[4]\t"S-b1"[3][ext 3]\t\t# "edge" lid 1 4xFDR10\n'
        '\nCa\t2 "H-f1"\t\t# "login HCA-1"\n'
        '[2](f1b)\t"S-b1"[1]\t\t# lid 2 lmc 0 "edge" lid 1 2xHDR\n'
    )
    (tmp_path / "fabric.txt").write_text(text)
    found = read_ibnetdiscover(tmp_path / "fabric.txt", HOST)
    assert {tuple(cable) for cable in cables(found)} == {
        ("login:nic0", "edge", 100.0, 1),
        ("edge", "core", 40.0, 1),
    }


@pytest.mark.parametrize(
    ("gcn", "gbps"), [("gfx942", 64.0), ("gfx90a", 50.0), ("910", 50.0), ("gfx908", 46.0)]
)
def test_links_between_amds_gpus_count_by_their_architecture(tmp_path: Path, gcn: str, gbps: float) -> None:
    links = "".join(f'<xgmi target="0000:{at}0:00.0" count="1" tclass="0x038000"/>' for at in range(7))
    gpu = f'<pci busid="a"><gpu dev="0" sm="94" gcn="{gcn}" rank="0">{links}</gpu></pci>'
    (tmp_path / "rccl.xml").write_text(f'<system version="2"><cpu numaid="0">{gpu}</cpu></system>')
    assert read_inside(tmp_path / "rccl.xml", "n").gpu_gbps == 7 * gbps


def test_of_a_file_of_several_hosts_one_is_read(tmp_path: Path) -> None:
    """As where NVLinks join them: each processor says whose it is."""
    one, other = (_system().replace('numaid="0"', f'numaid="0" host_hash="0x{at}"') for at in (1, 2))
    both = one.replace("</system>", other[other.index("<cpu") :])
    (tmp_path / "nccl.xml").write_text(both)
    assert read_inside(tmp_path / "nccl.xml", "n").gpus == 4


def test_slurms_file_with_other_spacing_and_case_is_read(tmp_path: Path) -> None:
    (tmp_path / "topology.conf").write_text(
        "##\n# tree\n##\nswitchname=s0 NODES=tux[0-3,12,18-20]   LinkSpeed=900\n"
        "SwitchName=s1 Nodes=tux21 LinkSpeed=100Mb/s\n"
        "SwitchName=s2 Switches=s[0-1] # both\n"
    )
    found = read_slurm(tmp_path / "topology.conf", 100.0, HOST)
    assert [host.names for host in found.hosts] == ["tux[0-3],tux[12,18-21]"]
    assert [(each.names, each.tier) for each in found.switches] == [("s[0-1]", "leaf"), ("s2", "spine")]


Reader = Callable[[Path], object]


def slurm(path: Path) -> object:
    return read_slurm(path, 1, HOST)


def infiniband(path: Path) -> object:
    return read_ibnetdiscover(path, HOST)


def inside(path: Path) -> object:
    return read_inside(path, "n")


@pytest.mark.parametrize(
    ("reader", "text", "says"),
    [
        (inside, "<system", "no XML"),
        (inside, "<graphs/>", "<graphs>"),
        (inside, "<system/>", "names no GPU"),
        (inside, _system().replace('dev="0"', 'dev="x"', 1), "not a number"),
        (inside, _system().replace('dev="0"', 'dev="nan"', 1), "not a number"),
        (slurm, "BlockName=b Nodes=a", ":1: blocks"),
        (slurm, "NodeName=a", "does not begin with SwitchName"),
        (slurm, "SwitchName=a Switches=b", "is not described by any line"),
        (slurm, "SwitchName=a Switches=a", "no switch has hosts"),
        (
            slurm,
            "SwitchName=a Nodes=x\nSwitchName=b Switches=b",
            "below itself",
        ),
        (slurm, "SwitchName=a Nodes=n[1-", ":1: 'n[1-': brackets"),
        (slurm, "SwitchName=a Nodes=x\nSwitchName=a Nodes=y", "twice"),
        (infiniband, "", "no link found"),
        (infiniband, _fabric().replace("4xNDR", ""), "no known speed of the link"),
        (infiniband, _fabric().partition("\nca")[0], "is the file complete?"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, reader: Reader, text: str, says: str
) -> None:
    path = tmp_path / "given"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        reader(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_tiers_of_thousands_of_switches_are_counted_once_each(tmp_path: Path) -> None:
    ladder = [f"SwitchName={side}{at} Switches=a{at - 1},b{at - 1}" for at in range(1, 1500) for side in "ab"]
    path = tmp_path / "given"
    path.write_text("\n".join(["SwitchName=a0 Nodes=x", "SwitchName=b0 Nodes=y", *ladder]))
    assert len(read_slurm(path, 1, HOST).switches) == 1500
