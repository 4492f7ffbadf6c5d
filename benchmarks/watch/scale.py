"""Cost of `dpro watch`, and time until it names a fault, by the number of ranks.

    python -m benchmarks.watch.scale [--ranks 64 256 1024] [--cases healthy straggler hang] [--calls 20]

A job is simulated in real time: each rank's folder grows through the recorder's own code (its records, its
answers to the watcher, its dumps of a job that hangs); only the ring of calls is made up. Hosts have eight
ranks and their own clock, which is compared with other clocks. The command runs beside it, as a user would
run it. Measured are its CPU time (since its first look) and memory, and the time from the fault to the
finding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import numpy as np

from benchmarks.recording import ENVIRONMENT
from dpro.collectors.inside import records
from dpro.collectors.inside.calls.flight import Flight, Ring, RingProgress
from dpro.collectors.inside.files import write_whole
from dpro.collectors.inside.process.requests import Requests
from dpro.collectors.launch.recording import Launch
from dpro.collectors.launch.start import RecordOptions, Request, make_raw, prepare

RANKS_PER_HOST = 8
VICTIM = 2
COMPARED_EVERY_S = 60.0
FAULT_AT = 40  # the step
STEPS = {"healthy": 90, "straggler": 80, "hang": 15}
HANGS_S = 60.0  # longest time for which a job that hangs is watched
TICKS = os.sysconf("SC_CLK_TCK")
_ENTRY = (
    '{{"collective_seq_id":{number},"input_dtypes":["Float"],"input_sizes":[[65536]],"is_p2p":false,'
    '"op_id":{number},"output_dtypes":["Float"],"output_sizes":[[65536]],"p2p_seq_id":0,"pg_id":0,'
    '"process_group":["0","default_pg"],"profiling_name":"gloo:all_reduce","record_id":{number},'
    '"retired":%s,"state":"scheduled","thread_id":"140546694278016","thread_name":"python",'
    '"time_created_ns":%d,"time_discovered_completed_ns":0,"time_discovered_started_ns":0,'
    '"timeout_ms":1800000}}'
)


@cache
def _groups(num_ranks: int) -> str:
    group = f'"desc":"default_pg","name":"0","ranks":"{list(range(num_ranks))}"'
    return f'"nccl_comm_state":{{}},"pg_config":{{"0":{{{group}}}}}'


@dataclass
class Call:
    """One collective: its text in dumps, when each rank called it (-1: never), whether it has ended."""

    entry: str
    called_ns: np.ndarray
    ended: bool = True


@dataclass
class Rank:
    """One process of the job, which acts as the recorder for the recorder's probes.

    Attributes:
        rank: which.
        launch: the folder of its launch.
        folder: the process's own.
        ahead_ns: of its clock.
        last_step_s: when a step last ended.
        calls: latest calls of the job.
    """

    rank: int
    num_ranks: int
    launch: Path
    ahead_ns: int
    calls: list[Call]
    last_step_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """Begin to record."""
        host = self.rank // RANKS_PER_HOST
        self.folder = self.launch / f"node{host}-{1000 + self.rank}"
        self.folder.mkdir()
        self.records = records.RecordWriter(self.folder / "records.bin")
        facts = {
            "rank": self.rank, "world_size": self.num_ranks, "local_rank": self.rank % RANKS_PER_HOST,
            "host": f"node{host}", "clock": f"boot{host}", "pid": 1000 + self.rank,
            "started_ns": time.time_ns(), "attempt": "", "environment": {}, "versions": {},
            "gpu_name": "", "gpu_uuid": "",
        }  # fmt: skip
        self.write_file("facts.json", json.dumps(facts).encode())
        self.write_file("groups.json", json.dumps({"0": list(range(self.num_ranks))}).encode())
        self.records.write(records.ANCHOR, 0, 0, 0, 0)
        self.flight, self.control = Flight(self), Requests(self)  # type: ignore[arg-type]
        self.num_called = 0
        self.flight._rings = [Ring("fr", ".json", self.dump)]
        self.flight._levels = {"fr": RingProgress(time.monotonic(), 0, -1, 0.0, 1.0, 0)}
        # There are no process groups here that could be asked.
        self.flight._enqueued = lambda: {"fr": self.num_called}  # type: ignore[method-assign]

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file as the recorder does."""
        write_whole(self.folder / name, content)

    def on_request(self, request: dict[str, Any]) -> None:
        """Answer with a stack."""
        threads = [{"name": "MainThread", "frames": [{"file": "job.py", "line": 1, "function": "step"}]}]
        answer = json.dumps({"rank": self.rank, "threads": threads}).encode()
        self.write_file(f"reply-{request['id']}.json", answer)

    def dump(self) -> bytes:
        """Return the ring of calls as a dump."""
        entries = [
            call.entry % ("true" if call.ended else "false", call.called_ns[self.rank] + self.ahead_ns)
            for call in self.calls
            if call.called_ns[self.rank] >= 0
        ]
        text = f'{{"comm_lib_version":"","entries":[{",".join(entries)}],{_groups(self.num_ranks)},'
        return f'{text}"pg_status":{{}},"version":"2.10"}}'.encode()

    def end_step(self, step: int, at_ns: int, worked_ns: int) -> None:
        """Write the recorder's records at the end of a step."""
        self.last_step_s = time.monotonic()
        now = at_ns + self.ahead_ns
        write = self.records.write
        write(records.UPDATE, 0, step + 1, now, now + 1000)
        write(records.CPU, now, worked_ns, worked_ns, 0)
        write(records.WORK, now, step + 1, 0, 0)

    def second(self) -> None:
        """Do the work of the recorder's thread for a second."""
        self.records.write(records.CLOCK, time.time_ns() + self.ahead_ns, time.monotonic_ns())
        self.flight._look(False)  # as the recorder's thread does
        self.flight.on_second()
        self.control.on_second()


class SimulatedJob:
    """A data-parallel job whose ranks wait for each other in each of a step's calls."""

    def __init__(self, run: Path, num_ranks: int, num_calls: int, step_s: float, ring: int) -> None:
        """Begin to record on all ranks."""
        draw = np.random.default_rng(num_ranks)
        self.num_calls, self.step_ns, self.ring, self.draw = num_calls, int(step_s * 1e9), ring, draw
        self.calls: list[Call] = []
        self.speed = draw.lognormal(0, 0.01, num_ranks)
        num_hosts = -(-num_ranks // RANKS_PER_HOST)
        ahead = np.rint(draw.normal(0, 5e6, num_hosts)).astype(np.int64)
        ahead[0] = 0
        self.launches = [Launch(run, f"node{host}-1-abc") for host in range(num_hosts)]
        for each in self.launches:
            make_raw(each)
        self.markers: list[IO[bytes]] = [
            prepare(each, Request(["job"], RecordOptions())) for each in self.launches
        ]
        self.ranks = [
            Rank(rank, num_ranks, self.launches[host].raw, int(ahead[host]), self.calls)
            for rank in range(num_ranks)
            for host in [rank // RANKS_PER_HOST]
        ]
        self.worked_ns = np.zeros(num_ranks)
        self.at_ns = time.time_ns()
        self.seconds = self.step = 0

    def make_step(self, slower: float, hangs: bool) -> None:
        """Make a step, in real time; in one that hangs, the victim does not reach the last call."""
        num = len(self.ranks)
        usual = self.step_ns / self.num_calls
        free = np.full(num, float(self.at_ns))
        for place in range(self.num_calls):
            work = usual * self.speed * self.draw.lognormal(0, 0.05, num)
            work[VICTIM] *= slower
            self.worked_ns += work
            came = np.rint(free + work).astype(np.int64)
            last = hangs and place == self.num_calls - 1
            if last:
                came[VICTIM] = -1
            number = self.step * self.num_calls + place
            self.calls.append(Call(_ENTRY.format(number=number), came, not last))
            free = np.full(num, float(came.max()) + 1e5)
        del self.calls[: -self.ring]
        for each in self.ranks:
            each.num_called += self.num_calls
        end = int(free[0]) + 1000
        self.wait_until(end)
        if hangs:
            return
        for each in self.ranks:
            each.end_step(self.step, end, int(self.worked_ns[each.rank]))
        self.at_ns, self.step = max(end, time.time_ns() - self.step_ns), self.step + 1

    def wait_until(self, at_ns: int) -> None:
        """Let time pass, and let the ranks do their work of each second."""
        while True:
            if time.time_ns() // 10**9 > self.seconds:
                self.seconds = time.time_ns() // 10**9
                if self.seconds % COMPARED_EVERY_S == 0 or self.step < 3:
                    self.compare_clocks()
                for each in self.ranks:
                    each.second()
            left_s = (at_ns - time.time_ns()) / 1e9
            if left_s <= 0:
                return
            time.sleep(min(left_s, 0.1))

    def compare_clocks(self) -> None:
        """Compare the clock of each host with that of a host of lower number."""
        for host in range(1, len(self.launches)):
            first = self.ranks[host * RANKS_PER_HOST]
            other = self.ranks[(host - 1) // 8 * RANKS_PER_HOST]
            error = int(self.draw.normal(0, 20e3))
            offset = first.ahead_ns - other.ahead_ns + error
            first.records.write(records.PEER, time.time_ns() + first.ahead_ns, other.rank, offset, 60_000)

    def end(self) -> None:
        """End the recording."""
        for each, marker in zip(self.launches, self.markers, strict=True):
            each.remove_marker()
            marker.close()


class WatchCommand:
    """The command beside the job."""

    def __init__(self, run: Path) -> None:
        """Start the command."""
        command = [sys.executable, "-m", "dpro", "watch", str(run), "--json"]
        environment = ENVIRONMENT | {"POLARS_MAX_THREADS": "1", "DPRO_HISTORY": "off"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.notices: list[dict[str, Any]] = []
        self.peak_mib = 0.0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.notices.append(json.loads(line))

    def cpu_s(self) -> float:
        """Return the command's CPU time so far, and record its memory."""
        folder = Path(f"/proc/{self.process.pid}")
        status = (folder / "status").read_text().partition("VmHWM:")[2]
        self.peak_mib = int(status.split()[0]) / 1024
        words = (folder / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / TICKS


def play(case: str, num_ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Simulate and watch one job."""
    with TemporaryDirectory(prefix="dpro-scale-") as folder:
        run = Path(folder) / "run"
        run.mkdir()
        job = SimulatedJob(run, num_ranks, options.calls, options.step_s, options.ring)
        watched, since_ns = WatchCommand(run), 0
        try:
            for _ in range(5):  # while the command starts
                job.make_step(1.0, False)
            begun_s, begun_cpu_s = time.monotonic(), watched.cpu_s()
            for step in range(5, STEPS[case]):
                if watched.notices:
                    break
                slow = case == "straggler" and step >= FAULT_AT
                job.make_step(options.severity if slow else 1.0, False)
                if step == FAULT_AT:
                    since_ns = job.at_ns - job.step_ns
            if case == "hang":
                since_ns = job.at_ns
                job.make_step(1.0, True)
                deadline = time.monotonic() + HANGS_S
                while not watched.notices and time.monotonic() < deadline:
                    job.wait_until(time.time_ns() + 10**8)
            elapsed_s, cpu_s = time.monotonic() - begun_s, watched.cpu_s() - begun_cpu_s
        finally:
            job.end()
            watched.process.wait(60)
        row = {"case": case, "ranks": num_ranks, "start_cpu_s": round(begun_cpu_s, 1)}
        row |= {"cores": round(cpu_s / elapsed_s, 3), "peak_mib": round(watched.peak_mib)}
        row |= {"steps": job.step, "load": round(os.getloadavg()[0], 1)}
        if watched.notices:
            first = watched.notices[0]
            row |= {"class": first["class"], "named": first["ranks"]}
            if since_ns:
                row["after_s"] = round((first["time_ns"] - since_ns) / 1e9, 1)
            if case == "straggler":
                row["after_steps"] = first["step"] + 1 - FAULT_AT
        return row


def main() -> None:
    """Simulate the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--cases", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--calls", type=int, default=20, help="per step")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--ring", type=int, default=200, help="calls that PyTorch remembers")
    parser.add_argument("--severity", type=float, default=1.5, help="of the straggler")
    options = parser.parse_args()
    for num_ranks, case in itertools.product(options.ranks, options.cases):
        print(json.dumps(play(case, num_ranks, options)), flush=True)


if __name__ == "__main__":
    main()
