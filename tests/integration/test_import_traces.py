"""Every real trace either imports, or is refused with a line that says what it is."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

import pytest

from dpro.errors import DproError
from dpro.ingest.importer import import_sources
from dpro.schema import SPANS
from dpro.store import open_run
from tests.conftest import REPOSITORY
from tests.integration.test_import_parallel import digests

# First match wins: what a file is read as, or the words it is refused with.
READ_AS = {
    "multirank/*/et/*": "refused: an execution trace without times",
    "multirank/*/et_linked/*": "execution trace",
    "multirank/*": "kineto",
    "nccl_meta/*": "kineto",
    "perf/*": "kineto",
    "single/*": "kineto",
    "single_hta/*_et.json.gz": "refused: an execution trace without times",
    "single_hta/*": "kineto",
    "et/linear_kineto.json.gz": "kineto",
    "et/*": "refused: an execution trace without times",
    "robust/*": "kineto",
    "flight_recorder/*.log": "refused: 1 file that is not a trace",
    "flight_recorder/*": "flight recorder",
    "nsys/*": "nsys",
    "pp_timeline/*/config.json.gz": "refused: 1 JSON file that is not a trace",
    "pp_timeline/*": "pipeline timeline",
    "straggler_parquet/*.parquet": "op-level parquet",
    "straggler_parquet/*timeline-*": "refused: 1 timeline drawn from an analysis",
    "straggler_parquet/meta-*": "refused: 1 file that is not a trace",
    "straggler_parquet/*": "refused: 1 JSON file that is not a trace",
    "MANIFEST.json": "refused: 1 JSON file that is not a trace",
    "README.md": "refused: 1 file that is not a trace",
}


def _files() -> list[str]:
    folder = Path(os.environ.get("DPRO_TRACES", REPOSITORY.parent / "shared" / "traces"))
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]


@pytest.mark.parametrize("name", _files())
def test_a_real_trace_is_imported_or_refused_by_name(name, traces, tmp_path):
    expected = next((READ_AS[pattern] for pattern in READ_AS if fnmatch.fnmatch(name, pattern)), "a format")
    try:
        manifest = import_sources([traces / name], tmp_path / "run")
    except DproError as error:
        read_as = f"refused: {error}"
        assert "\n" not in read_as
        assert name in read_as
        assert list(tmp_path.iterdir()) == []
    else:
        read_as = ", ".join(sorted(set(manifest.sources.values())))
        assert sum(open_run(tmp_path / "run").rows().values()) > 0
    if expected.startswith("refused: "):
        assert read_as.startswith("refused: ")
        assert expected.removeprefix("refused: ") in read_as
    else:
        assert read_as == expected


@pytest.mark.slow
def test_a_folder_of_everything_that_one_job_left_is_one_run_whoever_reads_it(traces, tmp_path):
    folder = traces / "multirank" / "param_dlrm_v100_8r"
    manifest = import_sources([folder], tmp_path / "run", jobs=2)
    import_sources([folder], tmp_path / "alone", jobs=1)
    assert digests(tmp_path / "run") == digests(tmp_path / "alone")
    assert manifest.ranks == list(range(8))
    assert manifest.sources["spans"] == "execution trace, kineto"
    assert open_run(tmp_path / "run").table(SPANS)["rank"].n_unique() == 8


def test_two_jobs_in_one_folder_are_an_error_that_names_two_of_their_files(traces, tmp_path):
    with pytest.raises(DproError, match=r"trace-AR\.parquet and .*trace-ST\.parquet: both are rank 0"):
        import_sources([traces / "straggler_parquet"], tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
