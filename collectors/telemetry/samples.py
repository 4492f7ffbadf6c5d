"""Files of telemetry samples: written while the job runs, and read back.

A file is a zlib stream of JSON lines. The first line names the host; each other line is
`[time_ns, rank, device, {counter: value}]` with only the values that differ from the line before of the same
rank and device. The stream is flushed after every sample, so samples survive the death of the writer, and a
truncated file is read up to the cut. A new file begins when one reaches `FILE_BYTES`, each with all values,
so that complete files can be converted while the job runs.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dpro.words import from_json

FILE_BYTES = 1 << 20
OPEN_SUFFIX = ".open"  # suffix of the file still being written
_CHUNK_BYTES = 1 << 16


class TelemetrySample(NamedTuple):
    """Values read at one moment; an event is written even if its value has not changed."""

    time_ns: int
    rank: int
    device: str
    values: Mapping[str, float]
    is_event: bool = False


class SampleWriter:
    """Writer of samples to files `telemetry-N.z` of a folder."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._files, self._written = 0, 0
        self._descriptor = -1

    def append(self, samples: Iterable[TelemetrySample]) -> None:
        """Write the values that have changed.

        Raises:
            OSError: they could not be written completely, for example on a full disk; later calls would fail,
                too.
        """
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            self._descriptor = os.open(self._path(OPEN_SUFFIX), flags, 0o644)
            self._stream = zlib.compressobj()
            self._written = 0
            self._last: dict[tuple[int, str], dict[str, float]] = {}
            self._write(json.dumps({"host": self._host}) + "\n")
        lines = [line for sample in samples for line in self._changes(sample)]
        if lines:
            self._write("".join(lines))
        if self._written >= FILE_BYTES:
            self.close()

    def close(self) -> None:
        """Complete the current file, which readers then find under its final name."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(OSError):  # another process may have finished the run and removed the folder
            os.rename(self._path(OPEN_SUFFIX), self._path())
        self._files += 1

    def _path(self, suffix: str = "") -> Path:
        return self._folder / f"telemetry-{self._files:05d}.z{suffix}"

    def _changes(self, sample: TelemetrySample) -> Iterator[str]:
        values = sample.values
        if not sample.is_event:
            last = self._last.setdefault((sample.rank, sample.device), {})
            values = {name: value for name, value in values.items() if last.get(name) != value}
            last.update(values)
        if values:
            line = [sample.time_ns, sample.rank, sample.device, values]
            yield json.dumps(line, separators=(",", ":")) + "\n"

    def _write(self, text: str) -> None:
        content = self._stream.compress(text.encode()) + self._stream.flush(zlib.Z_SYNC_FLUSH)
        if os.write(self._descriptor, content) != len(content):
            raise OSError("the disk is full")
        self._written += len(content)


def sample_files(folder: Path, *, whole: bool = False) -> list[Path]:
    """Return the files of samples in a folder, in writing order; only complete ones if `whole`."""
    return sorted(folder.glob("telemetry-*.z")) + ([] if whole else sorted(folder.glob("telemetry-*.z.open")))


def read_samples(path: Path) -> tuple[str, list[TelemetrySample]]:
    """Read the samples of a file, up to where it is truncated or damaged.

    Returns:
        The host, and the samples; an empty host and no samples if even the first line is incomplete.
    """
    lines = _lines(path)
    host = str(_decoded(next(lines, b"")).get("host", ""))
    samples = []
    for line in lines:
        try:
            time_ns, rank, device, values = from_json(line)
            samples.append(TelemetrySample(int(time_ns), int(rank), str(device), dict(values)))
        except (ValueError, TypeError):
            break
    return host, samples


def _decoded(line: bytes) -> Mapping[str, Any]:
    with suppress(ValueError):
        document = from_json(line)
        return document if isinstance(document, dict) else {}
    return {}


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the complete lines of a stream, up to where it is damaged."""
    stream = zlib.decompressobj()
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            try:
                text = stream.decompress(chunk)
            except zlib.error:
                return
            *whole, rest = (rest + text).split(b"\n")
            yield from whole
