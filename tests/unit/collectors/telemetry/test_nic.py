"""Network ports, from a made-up /sys and /proc."""

from pathlib import Path

import pytest

from dpro.collectors.telemetry.node import find_ports

ROUTES = """Iface	Destination	Gateway	Flags
eth0	00000000	010200C0	0003
bond0	000200C0	00000000	0001
"""


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def interface(name: str, *, flags: str = "0x1003", state: str = "up", **statistics: int) -> dict[str, object]:
    folder = f"class/net/{name}"
    counted = {f"{folder}/statistics/{counter}": value for counter, value in statistics.items()}
    return {f"{folder}/flags": flags, f"{folder}/operstate": state} | counted


MELLANOX = "class/infiniband/mlx5_0/ports/1"
EFA = "class/infiniband/rdmap16s27/ports/1"


@pytest.fixture
def proc(tmp_path):
    return tree(tmp_path / "proc", {"net/route": ROUTES})


def test_infiniband_data_is_reported_in_bytes(tmp_path, proc):
    sys = tree(
        tmp_path / "sys",
        {
            f"{MELLANOX}/counters/port_xmit_data": 1000,
            f"{MELLANOX}/counters/port_rcv_data": 25,
            f"{MELLANOX}/counters/link_downed": 1,
            f"{MELLANOX}/hw_counters/out_of_sequence": 17,
            f"{MELLANOX}/hw_counters/lifespan": 10,
            f"{MELLANOX}/state": "4: ACTIVE",
            f"{MELLANOX}/rate": "400 Gb/sec (4X NDR)",
        },
    )
    (port,) = find_ports(sys, proc)
    assert port.device == "mlx5_0:1"
    assert port.read(False) == {"tx_bytes": 4000, "rx_bytes": 100}
    rest = {"link_downed": 1, "out_of_sequence": 17, "up": 1, "rate_gbps": 400}
    assert port.read(True) == {"tx_bytes": 4000, "rx_bytes": 100} | rest


def test_drivers_that_count_bytes_themselves_are_believed(tmp_path, proc):
    files = {"hw_counters/tx_bytes": 50, "hw_counters/retrans_bytes": 8, "counters/port_xmit_data": 50}
    sys = tree(tmp_path / "sys", {f"{EFA}/{name}": value for name, value in files.items()})
    (port,) = find_ports(sys, proc)
    # Where a driver has both, the one of the specification comes first.
    assert port.read(True) == {"tx_bytes": 200, "retrans_bytes": 8}


def test_a_port_that_goes_down_is_reported(tmp_path, proc):
    sys = tree(tmp_path / "sys", {f"{MELLANOX}/counters/port_xmit_data": 1, f"{MELLANOX}/state": "4: ACTIVE"})
    (port,) = find_ports(sys, proc)
    tree(sys, {f"{MELLANOX}/state": "1: DOWN"})
    assert port.read(True)["up"] == 0


def test_a_counter_that_is_not_a_number_or_cannot_be_read_is_left_out(tmp_path, proc):
    files = {"counters/port_xmit_data": 1, "counters/port_rcv_data": "", "hw_counters/odd": "N/A"}
    sys = tree(tmp_path / "sys", {f"{MELLANOX}/{name}": value for name, value in files.items()})
    (port,) = find_ports(sys, proc)
    assert port.read(True) == {"tx_bytes": 4}
    (sys / MELLANOX / "counters/port_xmit_data").unlink()
    assert port.read(True) == {}


def test_interfaces_in_use_are_those_with_a_route_and_hardware_that_is_up(tmp_path, proc):
    sys = tree(
        tmp_path / "sys",
        interface("eth0", tx_bytes=5, rx_bytes=6)
        | interface("bond0", tx_bytes=1)
        | interface("eth7", tx_bytes=1)
        | interface("eth8", tx_bytes=1, state="down")
        | interface("eth9", tx_bytes=1, flags="0x1002")
        | interface("lo", tx_bytes=1, flags="0x9")
        | interface("veth1", tx_bytes=1)
        | {"class/net/eth0/speed": 100_000, "class/net/bond0/speed": -1}
        | {f"class/net/{name}/device/vendor": 1 for name in ("eth7", "eth8", "eth9")}
        | {"class/net/bonding_masters": "bond0"},
    )
    ports = {port.device: port.read(True) for port in find_ports(sys, proc)}
    assert ports.keys() == {"eth0", "bond0", "eth7"}
    assert ports["eth0"] == {"tx_bytes": 5, "rx_bytes": 6, "up": 1, "rate_gbps": 100}
    assert "rate_gbps" not in ports["bond0"]


def test_an_interface_with_a_route_of_ipv6_alone_is_in_use(tmp_path):
    route = f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} 00000400 00000001 00000000 00000001     bond6"
    proc = tree(tmp_path / "proc6", {"net/ipv6_route": route})
    sys = tree(tmp_path / "sys", interface("bond6", tx_bytes=1) | interface("bond4", tx_bytes=1))
    assert [port.device for port in find_ports(sys, proc)] == ["bond6"]


def test_a_node_without_any_of_it_has_no_ports(tmp_path):
    assert find_ports(tmp_path / "sys", tmp_path / "proc") == []
