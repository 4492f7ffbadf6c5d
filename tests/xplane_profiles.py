"""Small profiles of XLA's profiler, made here with the messages that the importer reads."""

from __future__ import annotations

from typing import Any

from dpro.extensions.xplane.xspace import _messages


class Plane:
    """A plane in the making: events and facts get their numbers as they come."""

    def __init__(self, name: str, **facts: Any) -> None:
        self.message = _messages()["Plane"](name=name.encode())
        self.lines: list[Any] = []
        self._events: dict[str, int] = {}
        self._stats: dict[str, int] = {}
        for fact, value in facts.items():
            self._add(self.message.stats.add(), fact, value)

    def line(self, name: str, *events: tuple[Any, ...], number: int = 1, start_ns: int = 0) -> None:
        """A line of events: name, start and duration in ns, and what is said of it."""
        line = _messages()["Line"](id=number, name=name.encode(), start_ns=start_ns)
        for named, start, took, *facts in events:
            event = line.events.add(name=self._number(self._events, self.message.event_names, named))
            event.offset_ps, event.duration_ps = round(start * 1000), round(took * 1000)
            for fact, value in dict(*facts).items():
                self._add(event.stats.add(), fact, value)
        self.lines.append(line)

    def content(self) -> bytes:
        """The plane as a file has it."""
        del self.message.lines[:]
        self.message.lines.extend(line.SerializeToString() for line in self.lines)
        return self.message.SerializeToString()

    def _add(self, stat: Any, fact: str, value: Any) -> None:
        stat.name = self._number(self._stats, self.message.stat_names, fact)
        if fact == "by name":
            stat.reference = self._number(self._stats, self.message.stat_names, value)
        elif isinstance(value, int):
            stat.signed = value
        else:
            stat.text = value.encode()

    def _number(self, numbers: dict[str, int], entries: Any, name: str) -> int:
        if name not in numbers:
            numbers[name] = len(numbers) + 1
            entries.add(key=numbers[name]).value.name = name.encode()
        return numbers[name]


def profile(*planes: Plane, host: str = "") -> bytes:
    """A file with these planes."""
    space = _messages()["Space"](planes=[plane.content() for plane in planes])
    space.hostnames.extend([host.encode()] if host else [])
    return space.SerializeToString()


def gpu_profile(rank: int, rows: int) -> bytes:
    """A rank with this many steps on one GPU, a kernel, a reduction and a copy each."""
    host = Plane("/host:CPU")
    steps = [("train", 1000 * at, 990, {"step_num": at}) for at in range(rows)]
    host.line("python", *steps, number=10)
    calls = [("cuLaunchKernel", 1000 * at + 100, 50, {"correlation_id": at + 1}) for at in range(rows)]
    host.line("python", *calls, number=10)
    device = Plane("/device:GPU:0")
    device.line(
        "Stream #13(Compute,MemcpyD2D)",
        *((f"fusion_{at}", 1000 * at + 200, 300, {"correlation_id": at + 1}) for at in range(rows)),
    )
    reduction = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    device.line("Stream #14(Compute)", *((reduction, 1000 * at + 600, 100) for at in range(rows)))
    device.line(
        "Stream #15(MemcpyH2D)",
        *(
            ("MemcpyH2D", 1000 * at + 800, 9, {"memcpy_details": "kind_src:pinned size:64 dest:0 async:1"})
            for at in range(rows)
        ),
    )
    start_ns = 1_700_000_000_000_000_000 + rank
    return profile(host, device, Plane("Task Environment", profile_start_time=start_ns), host=f"node{rank}")
