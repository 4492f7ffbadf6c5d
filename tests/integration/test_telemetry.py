"""`dpro record` with GPUs: a real job, and a fake of the driver's library that reports two GPUs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from dpro.schema import COLLECTIVES, COUNTERS
from dpro.store import Run
from tests.jobs import RECORD, complete, opened, record, script

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
INFO = [sys.executable, "-m", "dpro", "info"]
COMPILER = shutil.which("cc")
FIRST, SECOND = (f"00000000-0000-0000-0000-00000000000{index}" for index in (0, 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("gpus")
    library = folder / "lib" / "libnvidia-ml.so.1"
    library.parent.mkdir()
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    # The job goes on until the sampler has seen a while of it.
    body = """
    import time
    from pathlib import Path
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not list(Path().glob("run/.raw/*/log.txt")):
        train_step()
    for _ in range(20):
        train_step()
        time.sleep(0.05)
    """
    job = [*RECORD, "-o", "run", "--telemetry-period", "0.05", "--", *script(folder, body)]
    paths = os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")]))
    done = complete(job, folder, LD_LIBRARY_PATH=paths)
    assert (done.returncode, done.stderr) == (0, b"")
    return opened(folder / "run")


def values(run: Run, device: str, counter: str) -> list[float]:
    return run.table(COUNTERS).filter(device=device, counter=counter)["value"].to_list()


def test_gpus_are_sampled_beside_the_job(run):
    assert values(run, FIRST, "sm_clock_mhz") == [1980]  # written once: it never changed
    power = values(run, FIRST, "power_w")
    assert len(power) > 10
    assert power == sorted(power)
    assert power[0] >= 400
    assert values(run, FIRST, "memory_used_bytes") == [11 << 30]
    assert "remapped_rows_pending" not in run.table(COUNTERS)["counter"]


def test_a_gpu_that_is_lost_ends_its_own_samples_only(run):
    counters = run.table(COUNTERS)
    assert values(run, SECOND, "lost") == [1]
    (lost_ns,) = counters.filter(device=SECOND, counter="lost")["time_ns"]
    assert counters.filter(device=SECOND)["time_ns"].max() == lost_ns
    assert counters.filter(device=FIRST)["time_ns"].max() > lost_ns
    (warning,) = run.manifest.warnings
    assert warning.endswith(f"GPU {SECOND} was lost: GPU is lost")


def test_an_error_of_the_driver_is_an_event(run):
    assert values(run, FIRST, "xid") == [94]
    assert values(run, FIRST, "clocks_hw_thermal_slowdown") == [1]


@pytest.mark.slow
def test_info_says_what_was_sampled_and_what_was_wrong(run, tmp_path):
    done = complete([*INFO, str(run.path), "--json"], tmp_path)
    telemetry = json.loads(done.stdout)["telemetry"]
    first, second = telemetry["gpus"]
    assert (first["gpu"], first["xids"], first["errors"]) == (FIRST, {"94": 1}, {"ecc_uncorrected": 1})
    assert first["clocks_held_s"]["hw_thermal_slowdown"] > 0
    assert (second["gpu"], second["lost"], second["xids"]) == (SECOND, True, {})
    assert telemetry["samples"] > 10
    assert telemetry["ranks"] == [0]
    words = complete([*INFO, str(run.path)], tmp_path).stdout.decode()
    assert f"GPU {SECOND} on" in words


def test_ranks_are_sampled_all_the_same(run):
    assert values(run, "", "cpu_idle_s")
    assert run.table(COUNTERS).filter(pl.col("rank") == 0).height > 0


# The job imitates NCCL's Inspector.

INSPECTED = """
import json, os, time
from pathlib import Path
for _ in range(8):
    train_step()
line = {
    "header": {"id": "0xabc", "rank": 1, "n_ranks": 2, "nnodes": 1},
    "metadata": {
        "inspector_output_format_version": "v4.0", "hostname": os.uname().nodename, "pid": os.getpid(),
    },
    "coll_perf": {
        "coll": "AllReduce", "coll_sn": 7, "coll_msg_size_bytes": 4096, "coll_exec_time_us": 250,
        "coll_timing_source": "kernel_gpu",
        "event_trace_ts": {"coll_start_ts": time.time_ns() // 1000},
    },
}
assert Path(os.environ["NCCL_PROFILER_PLUGIN"]).is_file() and os.environ["NCCL_INSPECTOR_ENABLE"] == "1"
folder = Path(os.environ["NCCL_INSPECTOR_DUMP_DIR"])
(folder / "node-pid1.log").write_text(json.dumps(line) + "\\n")
"""


@pytest.mark.slow
def test_what_nccls_inspector_writes_becomes_collectives(tmp_path):
    (tmp_path / "plugin.so").touch()
    run, done = record(
        tmp_path, script(tmp_path, INSPECTED), "--nccl-inspector", "plugin.so", RANK=1, WORLD_SIZE=2
    )
    assert (done.returncode, done.stderr) == (0, b"")
    (row,) = run.table(COLLECTIVES).filter(source="NCCL Inspector").to_dicts()
    assert (row["rank"], row["op"], row["bytes_in"], row["duration_ns"]) == (1, "all_reduce", 4096, 250_000)
    assert run.manifest.versions["NCCL Inspector format"] == "v4.0"


@pytest.mark.slow
def test_without_the_option_nothing_of_it_is_set(tmp_path):
    ours = ("NCCL_PROFILER", "NCCL_INSPECTOR")
    body = f"import os\nprint([name for name in os.environ if name.startswith({ours})])"
    _, done = record(tmp_path, script(tmp_path, body))
    assert done.stdout == b"[]\n"


def test_a_plugin_that_is_not_there_is_refused(tmp_path):
    done = complete([*RECORD, "--nccl-inspector", "./none.so", "--", "true"], tmp_path)
    assert (done.returncode, done.stderr) == (2, b"dpro: --nccl-inspector ./none.so: no such file\n")
