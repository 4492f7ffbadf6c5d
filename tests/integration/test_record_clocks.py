"""Clocks of several hosts: real jobs in which every rank imitates a host with a wrong clock."""

import json
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.collectors.inject._dpro_autoload import ALIAS
from dpro.opening import ensure_finished
from dpro.replay.construction.graph_builder import build_graph
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, SYNCS, WORKERS
from dpro.store import Run, open_run, write_manifest, write_part
from tests.jobs import PATIENCE_S, environment

pytest.importorskip("torch")

MS = 1_000_000
SHIFT_MS = (0.0, 0.2, -5.0, 50.0)

# Every rank has another clock offset than its neighbours.
HOSTS = """
import functools, importlib, os, sys, time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
os.environ["LOCAL_WORLD_SIZE"] = "1"
peers, kernel = (importlib.import_module(f"{ALIAS}.{name}") for name in ("peers", "kernel"))
shift_ns = round(1_000_000 * SHIFT_MS[rank])
peers.host_clock = kernel.host_clock = lambda: f"host{rank % NUM_HOSTS}"
peers.PingPong = functools.partial(peers.PingPong, shown=lambda ns: ns + shift_ns)
peers.FAN_OUT = FAN_OUT

def train(seconds):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop = torch.zeros(())
    end = time.monotonic() + seconds
    while not stop:
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        stop += rank == 0 and time.monotonic() > end
        dist.all_reduce(stop)
"""


def job(folder: Path, body: str, num_hosts: int = 4, fan_out: int = 8) -> Path:
    path = folder / "job.py"
    constants = f"SHIFT_MS, NUM_HOSTS, FAN_OUT, ALIAS = {SHIFT_MS}, {num_hosts}, {fan_out}, {ALIAS!r}\n"
    path.write_text(constants + HOSTS + textwrap.dedent(body))
    return path


def torchrun(folder: Path, path: Path, ranks: int, *options: str) -> Run:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(path)]
    record = [sys.executable, "-m", "dpro", "record", "-o", "run", *options, "--", *launcher]
    done = subprocess.run(record, cwd=folder, env=environment(), capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr.decode()
    ensure_finished(folder / "run")
    return open_run(folder / "run")


def compared(run: Run) -> pl.DataFrame:
    return run.table(CLOCK_SAMPLES).filter(pl.col("peer_rank") >= 0)


def dpro(command: str, run: Path) -> dict[str, Any]:
    """What a command says of a run in JSON."""
    words = [sys.executable, "-m", "dpro", command, str(run), "--json"]
    done = subprocess.run(words, env=environment(), capture_output=True, check=True, timeout=PATIENCE_S)
    return json.loads(done.stdout)


TRAIN = """
dist.init_process_group("gloo")
train(4)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("two_hosts")
    windows = ("--skip", "50", "--every", "100000", "--window-steps", "20")
    return torchrun(folder, job(folder, TRAIN), 2, *windows)


def check_samples(run: Run, ranks: int) -> pl.DataFrame:
    """Every sample is right within half its round trip; returns how many there are of each pair."""
    assert run.manifest.warnings == []
    assert sorted(run.table(WORKERS)["clock"]) == [f"host{rank}" for rank in range(ranks)]
    samples = compared(run)
    shift = pl.Series(SHIFT_MS) * MS
    error = (samples["offset_ns"] - shift[samples["rank"]] + shift[samples["peer_rank"]]).abs()
    assert (error <= samples["round_trip_ns"] / 2).all()
    assert (samples["monotonic_ns"] == -1).all()
    times = run.table(CLOCK_SAMPLES).filter(pl.col("peer_rank") < 0)["time_ns"]
    assert samples["time_ns"].is_between(times.min() - 60 * MS, times.max() + 2_000 * MS).all()
    return samples.group_by("rank", "peer_rank").len()


@pytest.mark.slow
def test_offsets_of_clocks_are_recorded_within_their_round_trips_while_the_ranks_train(two_hosts):
    pairs = check_samples(two_hosts, 2)
    assert pairs.height == 1
    assert pairs["len"].item() >= 16  # at the start and a second later at least


@pytest.mark.slow
def test_with_a_fan_out_of_one_each_host_is_compared_with_the_one_before_it(tmp_path):
    pairs = check_samples(torchrun(tmp_path, job(tmp_path, TRAIN, fan_out=1), 4), 4)
    assert pairs.height == pairs["rank"].n_unique() == pairs["peer_rank"].n_unique() == 3


@pytest.mark.slow
def test_info_says_how_well_clocks_were_compared(two_hosts):
    clocks = dpro("info", two_hosts.path)["clocks"]
    assert (clocks["distinct"], clocks["compared"]) == (2, 1)
    assert clocks["samples"] == compared(two_hosts).height
    assert 0 < clocks["round_trip_us"] < 100_000


@pytest.mark.slow
def test_a_recorded_job_of_two_hosts_is_aligned_by_the_comparisons_of_their_clocks(two_hosts, tmp_path):
    # Kineto and the hooks have this machine's clock: what they saw on rank 1 is put on the clock of its host.
    shift_ns = round(SHIFT_MS[1] * MS)
    late = pl.when(pl.col("rank") == 1).then(shift_ns).otherwise(0)
    for table in (SPANS, COLLECTIVES, SYNCS, STEPS):
        write_part(
            tmp_path / "run", table, "all", two_hosts.table(table).with_columns(pl.col("start_ns") + late)
        )
    for table in (WORKERS, CLOCK_SAMPLES):
        write_part(tmp_path / "run", table, "all", two_hosts.table(table))
    write_manifest(tmp_path / "run", two_hosts.manifest)
    built = build_graph(open_run(tmp_path / "run"))
    clock = built.alignment.of(1)
    assert (clock.source, clock.name) == ("clock samples", socket.gethostname() + " (host1)")
    assert abs(clock.line.offset_ns - shift_ns) <= clock.line.uncertainty_ns < 0.1 * MS
    assert built.alignment.conflicts == ()
    document = dpro("replay", tmp_path / "run")
    [first, second] = document["clocks"]
    assert (first["source"], first["ranks"], first["offset_ns"]) == ("reference", [0], 0)
    assert (second["source"], second["ranks"]) == ("clock samples", [1])
    assert second["offset_ns"] == clock.line.offset_ns
    assert set(second) >= {"clock", "window", "drift_ppm", "uncertainty_ns", "reference_ns"}


@pytest.mark.slow
def test_one_rank_of_a_host_compares_its_clock_and_ranks_of_one_host_need_not(tmp_path):
    body = """
    dist.init_process_group("gloo")
    train(2)
    """
    run = torchrun(tmp_path, job(tmp_path, body, num_hosts=2), 4)
    samples = compared(run)
    assert samples["rank"].n_unique() == 1
    assert samples.select((pl.col("rank") - pl.col("peer_rank")) % 2 == 1).to_series().all()


@pytest.mark.slow
def test_a_rank_goes_on_and_ends_well_when_the_one_it_compares_with_is_gone(tmp_path):
    body = """
    from pathlib import Path
    compared = Path("compared")
    plain = peers.PingPong.func.compare
    def compare(*arguments):
        found = plain(*arguments)
        compared.touch()
        return found
    peers.PingPong.func.compare = compare

    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    steps = 40
    while not compared.exists():  # else the store may be asked when it is gone, of which torch complains
        step()
        steps += 1
    if rank == 0:
        os._exit(0)
    for _ in range(40):
        step()
    print(steps)
    """
    path = job(tmp_path, body)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "dpro", "record", "-o", "run", "--", sys.executable, str(path)]
    shared = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pipe = subprocess.PIPE
    jobs = [
        subprocess.Popen(
            command, cwd=tmp_path, env=environment(RANK=rank, **shared), stdout=pipe, stderr=pipe
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=PATIENCE_S) for process in jobs]
    assert [process.returncode for process in jobs] == [0, 0]
    steps, errors = outputs[1]
    # A thread of ours may ask the store that is gone, for the next window: of that torch complains, once.
    complaints = [line for line in errors.splitlines() if line.startswith(b"[rank1]")]
    assert len(complaints) <= 1
    assert all(b"TCPStore.cpp" in line for line in complaints)
    assert b"Traceback" not in errors
    ensure_finished(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.manifest.warnings == []
    assert run.table(STEPS).filter(rank=1).height == int(steps) - 1
