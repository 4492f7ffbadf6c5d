"""What a run lacks is to be recorded by the tool that made it."""

from __future__ import annotations

import dataclasses

import pytest

from dpro.recorders import MODULES, SHAPES, how_to_record, tools_of
from tests.builders import cpu_job

IMPORT, RECORD = "dpro 0.1.0 import", "dpro record 0.1.0"


@pytest.mark.parametrize(
    ("made_by", "sources", "said"),
    [
        (RECORD, {"spans": "Kineto, in deep windows"}, "`dpro record --shapes`"),
        (IMPORT, {"spans": "kineto", "steps": "nsys, kineto"}, "record_shapes=True of torch.profiler"),
        (
            IMPORT,
            {"spans": "nsys"},
            "record_shapes=True of torch.profiler or `dpro record --shapes`, since nsys traces lack it",
        ),
    ],
)
def test_a_detail_is_asked_of_the_tool_that_made_the_run(tmp_path, made_by, sources, said):
    run = cpu_job().write(tmp_path)
    made = dataclasses.replace(run.manifest, created_by=made_by, sources=sources)
    assert how_to_record(SHAPES, dataclasses.replace(run, manifest=made)) == said


def test_of_an_unknown_run_dpro_itself_is_named():
    assert how_to_record(MODULES, None) == "`dpro record --modules`"


def test_a_trace_of_several_formats_has_each_once(tmp_path):
    run = cpu_job().write(tmp_path)
    made = dataclasses.replace(run.manifest, created_by=IMPORT, sources={"a": "kineto, nsys", "b": "nsys"})
    assert tools_of(dataclasses.replace(run, manifest=made)) == ["kineto", "nsys"]
