"""The file that samples go to while the job runs, and how it is read back.

A file is a zlib stream of JSON lines. The first line says whose samples they are, each other one is
`[time_ns, rank, device, {counter: value}]` and holds only the values that differ from the line before of the
same rank and device. The stream is flushed after every sample: what was written survives the death of the
writer, and a file that is cut short is read up to there. Files are changed every hour, and each begins with
all values, so that whole ones can be converted while the job runs.
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
OPEN_SUFFIX = ".open"  # of the file that is still written
_CHUNK_BYTES = 1 << 16


class TelemetrySample(NamedTuple):
    """Values that were read at one moment; an event is written even if its value is the same as last time."""

    time_ns: int
    rank: int
    device: str
    values: Mapping[str, float]
    is_event: bool = False


class SampleWriter:
    """Appends samples to files `telemetry-N.z` of a folder."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._files, self._written = 0, 0
        self._descriptor = -1

    def append(self, samples: Iterable[TelemetrySample]) -> None:
        """Write what has changed.

        Raises:
            OSError: it could not be written whole, for want of space, say; there is no use in going on.
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
        """End the file: it is whole."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        with suppress(OSError):  # another process may finish the run and remove the folder
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
    """Files of samples in a folder, in the order they were written; only those that are whole, if asked."""
    return sorted(folder.glob("telemetry-*.z")) + ([] if whole else sorted(folder.glob("telemetry-*.z.open")))


def read_samples(path: Path) -> tuple[str, list[TelemetrySample]]:
    """What a file holds, up to where it was cut short or is damaged.

    Returns:
        The host, and the samples; no host and no samples if not even the first line is whole.
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
    """Whole lines of a stream, as far as it goes."""
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
