"""The program on a checked host: one of its devices computes, copies, and exchanges with other hosts.

Reads one command per line on standard input, as JSON; answers each with one line that begins with `MARK`, as
JSON: measurements, or `error`. It is sent to the host as ASCII text, so it uses only the standard library and
torch and needs no dpro there. It ends when its input does, even during a command; it leaves nothing behind.
"""

import fcntl
import json
import mmap
import os
import queue
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

MARK = "dpro-check "
ENOUGH_S = 0.3  # of repetitions per figure
EXCHANGE_S = 0.1  # target duration of an exchange, from which its size follows
MIN_BYTES, MAX_BYTES = 1 << 20, 256 << 20
PROBE_BYTES = 256 << 10
REPEATS = 3
PATIENCE = 6  # times the timeout: how long another host may wait for one that does not answer
DISK_BYTES = 256 << 20
SIOCGIFADDR = 0x8915

Answer = dict[str, Any]
_here: dict[str, Any] = {}  # the device, the store, and the timeout


def _hello(device: int, interface: str, timeout_s: float) -> Answer:
    """Return what this host is, and its address for others; `device` is the number of a GPU."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    if gpus:
        torch.cuda.set_device(device)
    _here["device"] = torch.device("cuda", device) if gpus else torch.device("cpu")
    _here["timeout_s"] = timeout_s
    # A timeout must raise an exception here, not end this process.
    os.environ.update(TORCH_NCCL_BLOCKING_WAIT="1", TORCH_NCCL_ENABLE_MONITORING="0")
    name, address = _own_address(interface)
    if interface:
        os.environ.update(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    _here["store"] = dist.TCPStore(
        address, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return {
        "hostname": socket.gethostname(),
        "machine": _machine(),
        "address": address,
        "port": _here["store"].port,
        "devices": gpus,
        "model": torch.cuda.get_device_name() if gpus else "CPU",
    }


def _machine() -> str:
    """Return an identifier that containers on one machine share."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _own_address(interface: str) -> tuple[str, str]:
    """Return the network interface by which others reach this host, and its address."""
    if interface:
        return interface, _address_of(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the address
            address = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    for _, name in socket.if_nameindex():
        try:
            if _address_of(name) == address:
                return name, address
        except OSError:
            continue
    return "lo", "127.0.0.1"


def _address_of(interface: str) -> str:
    """Return the IPv4 address of an interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, asked)[20:24])


def _synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if _here["device"].type == "cuda":
        torch.cuda.synchronize()


def _seconds(work: Callable[[], Any]) -> float:
    """Return the seconds that some work takes, on the device too."""
    begin = time.perf_counter()
    work()
    _synchronize()
    return time.perf_counter() - begin


def _fastest_s(work: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several repetitions of some work."""
    _seconds(work)
    best, until = float("inf"), time.monotonic() + ENOUGH_S
    while time.monotonic() < until:
        best = min(best, _seconds(work))
    return best


def _compute() -> Answer:
    """Measure matrix products (1e12 operations/s) and copies of memory (1e9 bytes/s); check the products."""
    import torch

    device = _here["device"]
    gpu = device.type == "cuda"
    size = 8192 if gpu else 1024
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    product = torch.empty_like(left)
    seconds = _fastest_s(lambda: torch.mm(left, left, out=product))
    if not torch.equal(product, torch.mm(left, left)) or not _is_right():
        return {"error": "wrong matrix products: the device computes incorrectly"}
    block = torch.ones((1 << 30 if gpu else 128 << 20) // 4, device=device)
    other = torch.empty_like(block)
    moved = _fastest_s(lambda: other.copy_(block))
    figures = {"matmul": 2 * size**3 / seconds / 1e12, "memory": 2 * block.nbytes / moved / 1e9}
    if gpu:
        there = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        here = torch.empty(256 << 20, dtype=torch.uint8).pin_memory()
        figures["to device"] = here.nbytes / _fastest_s(lambda: there.copy_(here)) / 1e9
        figures["from device"] = here.nbytes / _fastest_s(lambda: here.copy_(there)) / 1e9
    return figures


def _is_right() -> bool:
    """Check an exact product of integer matrices by its sums (Freivalds, 1977)."""
    import torch

    device, drawn = _here["device"], torch.Generator().manual_seed(1)
    left, right = (torch.randint(-8, 9, (512, 512), generator=drawn).to(device).double() for _ in range(2))
    ones = torch.ones(512, 1, dtype=torch.float64, device=device)
    product = torch.mm(left.float(), right.float()).double()
    return bool(torch.equal(product @ ones, left @ (right @ ones)))


def _disk(folder: str) -> Answer:
    """Measure writing and reading a nameless file, of which nothing can be left behind; 1e9 bytes/s."""
    block = mmap.mmap(-1, 16 << 20)
    block.write(os.urandom(1 << 20) * 16)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        free = os.statvfs(file.fileno())
        size = min(DISK_BYTES, free.f_bavail * free.f_frsize // 20) // len(block) * len(block)
        if not size:
            return {"error": f"{folder}: less than {20 * len(block) >> 20} MiB are free"}
        begin = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.readinto(block):
            pass
        read = time.perf_counter() - begin
    return {"disk write": size / written / 1e9, "disk read": size / read / 1e9}


def _exchanges(partners: list[dict[str, Any]]) -> Answer:
    """Exchange with one host after another; return what each moved one way, 1e9 bytes/s, or its error."""
    return {"exchanges": [_attempt(_exchange, one) for one in partners]}


def _attempt(command: Callable[..., Answer], given: dict[str, Any]) -> Answer:
    """Return the answer of a command, or the error that it raised."""
    try:
        return command(**given)
    except Exception as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        return {"error": lines[0][:300]}


def _exchange(address: str, port: int, key: str, rank: int, other: tuple[str, int]) -> Answer:
    """All-reduce between two: both send the whole payload to each other at the same time.

    With gloo it is the steadiest way: an all-gather of two sometimes takes up to twice as long. Each end
    first connects to `other`, which accepts even when busy: so a broken link delays the next exchanges of its
    ends, and the hosts waiting for them, by only one timeout.
    """
    socket.create_connection((other[0], other[1]), _here["timeout_s"]).close()
    return _all_reduce(address, port, key, rank, 2)


def _all_reduce(address: str, port: int, key: str, rank: int, num_ranks: int) -> Answer:
    """All-reduce over some hosts; return its size in bytes, and its bus bandwidth as in the NCCL tests."""
    import torch
    import torch.distributed as dist

    def reduce(size: int) -> float:
        payload = torch.zeros(size // 4, device=_here["device"])
        return _seconds_of_transfer(lambda: dist.all_reduce(payload))

    with _group(address, port, key, rank, num_ranks):
        size, seconds = _measured(reduce)
    return {"bytes": size, "gbps": size / seconds / 1e9 * 2 * (num_ranks - 1) / num_ranks}


@contextmanager
def _group(address: str, port: int, key: str, rank: int, num_ranks: int) -> Iterator[None]:
    """Make a process group whose first member has the store; wait until all members have joined."""
    import torch.distributed as dist

    limit, patient = (timedelta(seconds=times * _here["timeout_s"]) for times in (1, PATIENCE))
    store = _here["store"]
    if rank:
        store = dist.TCPStore(address, port, None, is_master=False, timeout=limit)
    store = dist.PrefixStore(key, store)
    store.set(f"here{rank}", "1")
    store.wait([f"here{other}" for other in range(num_ranks)], patient)
    backend = "nccl" if _here["device"].type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measured(transfer: Callable[[int], float]) -> tuple[int, float]:
    """Return the bytes of a transfer of about `EXCHANGE_S`, as the first member decides, and its seconds."""
    import torch
    import torch.distributed as dist

    rate = PROBE_BYTES / min(transfer(PROBE_BYTES) for _ in range(2))
    wanted = torch.tensor([int(min(max(rate * EXCHANGE_S, MIN_BYTES), MAX_BYTES))], device=_here["device"])
    dist.broadcast(wanted, 0)
    size = int(wanted) // 4 * 4
    return size, min(transfer(size) for _ in range(REPEATS))


def _seconds_of_transfer(work: Callable[[], Any]) -> float:
    """Return the seconds of a transfer from the time when all members have arrived."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(1, device=_here["device"]))
    _synchronize()
    return _seconds(work)


COMMANDS: dict[str, Callable[..., Answer]] = {
    "hello": _hello, "compute": _compute, "disk": _disk, "exchanges": _exchanges, "all_reduce": _all_reduce,
}  # fmt: skip


def main() -> None:
    """Answer commands until the input ends."""
    commands: queue.Queue[Answer] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            commands.put(json.loads(line))
        os._exit(0)  # also ends a command that hangs

    threading.Thread(target=read, daemon=True).start()
    while True:
        command = commands.get()
        number, name = command.pop("number"), command.pop("do")
        answer = _attempt(COMMANDS[name], command)
        print(MARK + json.dumps({"number": number, **answer}), flush=True)


if __name__ == "__main__":
    main()
