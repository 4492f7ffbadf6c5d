"""Exports as Perfetto's own trace processor reads them, where its binary is there.

No package brings it: the Python package `perfetto` downloads it when it is first used, which a test must not.
"""

from __future__ import annotations

import os
import shutil

import pytest

from dpro.extensions.export.drawing import drawing
from dpro.extensions.export.formats import write_chrome, write_perfetto
from dpro.replay.timeline import replay
from dpro.timelines.slices import slices
from tests.builders import cpu_job

WRITERS = {"run.pftrace": write_perfetto, "run.json": write_chrome}


@pytest.fixture(scope="module")
def binary() -> str:
    names = ("trace_processor_shell", "trace_processor")
    found = os.environ.get("PERFETTO_TRACE_PROCESSOR") or next(filter(None, map(shutil.which, names)), None)
    if not found:
        pytest.skip("no trace processor: PERFETTO_TRACE_PROCESSOR names Perfetto's trace_processor_shell")
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_perfetto_itself_reads_every_slice_and_reports_no_error(binary, name, tmp_path):
    api = pytest.importorskip("perfetto.trace_processor")
    timeline = replay(cpu_job().build(tmp_path).graph)
    WRITERS[name](drawing(timeline), tmp_path / name)
    config = api.TraceProcessorConfig(bin_path=binary)
    with api.TraceProcessor(trace=str(tmp_path / name), config=config) as processor:
        (slices_read,) = processor.query("select count(*) as number from slice")
        errors = [
            row.name
            for row in processor.query("select name, value from stats where severity = 'error' and value > 0")
        ]
    assert errors == []
    assert slices_read.number == slices(timeline).height
