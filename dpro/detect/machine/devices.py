"""Which of the sampled GPUs are those of which ranks: on a shared node most may be other jobs'.

In: `counters` of GPUs, and `workers`. Out: a row per rank and GPU. GPUs are matched by uuid, or by PCI
address where two libraries give a GPU different uuids. Where ranks recorded neither, and their host has as
many GPUs as ranks, the n-th GPU is that of local rank n, and the row says so. Any other GPU belongs to no
rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import polars as pl

HEARTBEAT = "sampling_us"  # of every sample of a GPU
PCI = "pci_address"  # the GPU's, as a number: see `pci_number`
UUID, ADDRESS, ORDER = "uuid", "PCI address", "local rank"
SCHEMA = {"rank": pl.Int32(), "host": pl.String(), "device": pl.String(), "by": pl.String()}
_OF_GPUS = (HEARTBEAT, PCI, "xid", "ras", "lost")
_HIP_ID = re.compile("[0-9a-f]{16}")
_ADDRESS = re.compile(r"(?:([0-9a-f]+):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.IGNORECASE)


def bare_uuid(uuid: str) -> str:
    """Return a uuid without its prefix: `GPU-8c5…`, `MIG-8c5…` and `8C5…` are `8c5…`."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _of_hip(uuid: str) -> str:
    """Return the id of an AMD GPU, 16 hexadecimal digits; HIP gives its characters as the bytes of a uuid."""
    try:
        text = bytes.fromhex(uuid.replace("-", "")).decode("ascii").lower()
    except ValueError:
        return ""
    return text if _HIP_ID.fullmatch(text) else ""


def pci_number(address: str) -> int:
    """Return `0000:c1:00.0` as domain << 16 | bus << 8 | device << 3 | function; -1 if it is no address."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return -1
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return domain << 16 | bus << 8 | device << 3 | function


def sampled_gpus(counters: pl.DataFrame) -> pl.DataFrame:
    """Return the GPUs and GPU instances that were sampled: `host`, `device`, `pci` (-1 unknown), in order."""
    rows = counters.filter(
        (pl.col("rank") < 0) & (pl.col("device") != "") & pl.col("counter").is_in(_OF_GPUS)
    )
    pci = pl.col("value").filter(pl.col("counter") == PCI).last().fill_null(-1).cast(pl.Int64)
    return rows.group_by("host", "device").agg(pci=pci).sort("host", "device")


def gpus_of_ranks(counters: pl.DataFrame, workers: pl.DataFrame) -> pl.DataFrame:
    """Return the GPUs of each rank.

    Args:
        counters: table `counters`, or its rows of GPUs.
        workers: table `workers`.

    Returns:
        `rank`, `host`, `device`, `by` (how it is known: `UUID`, `ADDRESS` or `ORDER`), by rank. A rank on an
        instance of a partitioned GPU has two rows: the instance, whose memory is its own, and the GPU around
        it, whose clocks and errors are its own, too.
    """
    gpus = sampled_gpus(counters)
    rows = []
    for (host,), own in (
        workers.filter(pl.col("rank") >= 0).sort("rank").group_by("host", maintain_order=True)
    ):
        here = gpus.filter(host=host)
        rows += [(rank, host, *each) for rank, *each in _of_host(here, own)]
    return pl.DataFrame(rows, SCHEMA, orient="row").unique().sort("rank", "device")


def _of_host(gpus: pl.DataFrame, workers: pl.DataFrame) -> Iterator[tuple[int, str, str]]:
    """Yield rank, device and how it is known."""
    devices = gpus["device"].to_list()
    addresses = {pci: device for device, pci in gpus.select("device", "pci").iter_rows() if pci >= 0}
    known = pl.Series("gpu_pci", [], pl.String) if "gpu_pci" not in workers.columns else workers["gpu_pci"]
    pcis = dict(zip(workers["rank"], known))
    is_known = False
    for rank, uuid in workers.select("rank", "gpu_uuid").iter_rows():
        address = pci_number(pcis.get(rank, ""))
        is_known = is_known or bool(uuid) or address >= 0
        ids = {bare_uuid(uuid), _of_hip(uuid)}
        by_uuid = [device for device in devices if uuid and bare_uuid(device.rpartition("/")[2]) in ids]
        found = [(device, UUID) for device in by_uuid]
        if not found and address in addresses:
            found = [(addresses[address], ADDRESS)]
        for device, by in found:
            yield rank, device, by
            whole, is_part, _ = device.partition("/")
            if is_part and whole in devices:
                yield rank, whole, by
    if not is_known:
        yield from _in_order(gpus, workers)


def _in_order(gpus: pl.DataFrame, workers: pl.DataFrame) -> Iterator[tuple[int, str, str]]:
    """Yield the n-th GPU for local rank n, where there is one for each: drivers count GPUs by PCI address."""
    whole = gpus.filter(~pl.col("device").str.contains("/", literal=True)).sort("pci", "device")
    local = dict(workers.filter(pl.col("gpu_name") != "").select("local_rank", "rank").iter_rows())
    computes = sorted(local) == list(range(workers.height)) and whole.height == workers.height
    if computes and whole["pci"].n_unique() == whole.height:
        for place, device in enumerate(whole["device"]):
            yield local[place], device, ORDER
