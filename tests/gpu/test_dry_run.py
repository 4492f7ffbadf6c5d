"""The benchmark for GPUs, rehearsed without one: each check runs, and none keeps others from running."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.jobs import ROOT, environment

sys.path.append(str(ROOT / "benchmarks"))

from gpu_stages import runner
from gpu_stages.check import Bench, Check
from gpu_stages.processes import carriers, end_carriers, new_mark
from gpu_stages.table import rows, summary

PROGRAM = ROOT / "benchmarks" / "gpu.py"


def run(*arguments: object, cwd: Path, limit_s: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=limit_s
    )


def document(checks: dict[str, dict]) -> dict:
    return {"format": 1, "machine": {"gpus": ["H200"]}, "dry_run": False, "stages": {"facts": checks}}


def bench(folder: Path, dry: bool = False) -> Bench:
    return Bench(folder / "facts-one.json", folder, folder, dry, time.monotonic() + 60)


def test_without_a_gpu_it_says_so_and_runs_nothing(tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(cwd=tmp_path)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_check_is_rehearsed_once_and_its_lines_are_kept(tmp_path):
    pytest.importorskip("torch")
    words = ("--dry-run", "-o", "out", "--only", "facts.sync-correlation", "--json")
    first = run(*words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    [check] = json.loads(first.stdout)["stages"]["facts"].values()
    assert check["status"] == "whole"
    assert check["lines"]["sync events"]["figures"]["kinds"] == {}
    again = run(*words, cwd=tmp_path)
    assert "facts.sync-correlation" not in again.stderr
    assert json.loads(again.stdout)["stages"] == json.loads(first.stdout)["stages"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gpu.json"]


def test_all_checks_are_listed_with_less_than_nine_minutes_each(tmp_path):
    listed = run("--list", cwd=tmp_path).stdout.splitlines()
    stages = {line.partition(".")[0] for line in listed}
    assert stages == {"windows", "facts", "overhead", "replay", "pairs", "ranks"}
    assert all(float(line.split()[1]) < 540 for line in listed)


def test_the_first_stage_fits_into_nine_minutes_in_the_order_of_its_questions(tmp_path):
    listed = [line.split() for line in run("--list", cwd=tmp_path).stdout.splitlines()]
    first = [(name, float(limit_s)) for name, limit_s, *_ in listed if name.startswith("windows.")]
    assert [name for name, *_ in listed[: len(first)]] == [name for name, _ in first]
    assert first[0][0] == "windows.launch-cost"
    assert sum(limit_s for _, limit_s in first) <= 540


def test_nothing_has_to_be_installed_to_begin(tmp_path):
    words = [sys.executable, "-S", str(PROGRAM), "--list"]  # -S: no site-packages
    environment = {"PATH": "/usr/bin:/bin"}
    listed = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "facts.versions" in listed.stdout, listed.stderr


def test_a_check_that_fails_keeps_the_lines_it_had_and_what_it_raised(tmp_path):
    def work(here: Bench) -> None:
        here.say("first", n=3, seen_ms=1.5)
        here.attempt("second", lambda: 1 / 0)
        raise ValueError("the driver went away")

    folder = tmp_path / "work"
    folder.mkdir()
    code = runner.run_here(
        Check("facts", "one", "?", work), folder / "facts-one.json", tmp_path, 30, dry=False
    )
    said = json.loads((folder / "facts-one.json").read_text())
    assert code == 1
    assert "the driver went away" in said["error"]
    assert said["lines"]["first"] == {"n": 3, "figures": {"seen_ms": 1.5}, "bar": "", "holds": None}
    assert said["lines"]["second"]["holds"] is False


def test_a_check_past_its_limit_is_cut_short_with_all_it_started(tmp_path, monkeypatch):
    program = tmp_path / "benchmarks" / "gpu.py"
    program.parent.mkdir()
    program.write_text(
        "import subprocess, sys, time, pathlib\n"
        "results = pathlib.Path(sys.argv[sys.argv.index('--results') + 1])\n"
        'results.write_text(\'{"lines": {"first": {}}}\')\n'
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    found = runner.run_check(
        Check("facts", "one", "?", lambda _: None), tmp_path, tmp_path / "w", 2, dry=False
    )
    assert found["status"] == "cut short"
    assert found["lines"] == {"first": {}}
    assert found["left_behind"] == 1


def test_processes_are_ended_by_their_mark_whatever_session_they_are_in():
    mark = new_mark()
    process = subprocess.Popen(["sleep", "600"], env={"DPRO_GPU_CHECK": mark}, start_new_session=True)
    while not carriers(mark):  # it has not become `sleep` yet
        time.sleep(0.01)
    assert end_carriers(mark) == 1
    assert process.wait() == -9


def test_a_rehearsal_judges_nothing(tmp_path):
    here = bench(tmp_path, dry=True)
    here.say("step times", bar="≤ 1%", holds=False)
    assert here.lines["step times"]["holds"] is None
    here.attempt("fit", lambda: 1 / 0)
    assert here.lines["fit"]["holds"] is False


def test_recorded_runs_share_archives_of_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr("gpu_stages.check.LARGEST_TAR", 40_000)
    here = bench(tmp_path)
    for number in range(4):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / "spans.parquet").write_bytes(bytes(12_000))
        here.keep(folder)
    names = []
    for path in sorted(tmp_path.glob("runs-facts-*.tar")):
        assert path.stat().st_size <= 40_000
        with tarfile.open(path) as archive:
            names += [member.name for member in archive if member.isfile()]
    assert names == [f"one/run-{number}/spans.parquet" for number in range(len(names))]
    assert len(names) + len(here.lines) == 4


def test_all_runs_of_a_check_are_kept_also_where_it_fails(tmp_path, monkeypatch):
    def recorded(self: Bench, *words: object, **_: object) -> None:
        if words[0] == "record":
            Path(str(words[2])).mkdir()

    def work(here: Bench) -> None:
        for _ in range(2):
            here.record("run", ["true"])
        here.keep(here.record("own", ["true"])[0])
        raise ValueError("the driver went away")

    monkeypatch.setattr(Bench, "dpro", recorded)
    folder = tmp_path / "work"
    folder.mkdir()
    check = Check("facts", "one", "?", work)
    assert runner.run_here(check, folder / "facts-one.json", tmp_path, 30, dry=False) == 1
    with tarfile.open(tmp_path / "runs-facts-1.tar") as archive:
        assert sorted(archive.getnames()) == ["one/own", "one/run", "one/run-2"]
    said = json.loads((folder / "facts-one.json").read_text())
    assert "the driver went away" in said["error"]
    assert said["lines"] == {}


def test_runs_that_there_is_no_time_to_keep_are_named(tmp_path):
    here = bench(tmp_path)
    here.deadline = 0.0
    here.unkept = [tmp_path / "run"]
    here.keep_rest()
    assert here.lines["not kept, for lack of time"]["n"] == 1


def test_documents_are_put_together_and_whole_checks_win(tmp_path):
    whole = {"status": "whole", "wall_s": 1, "asks": "?", "lines": {}}
    cut = whole | {"status": "cut short", "error": "exit code None"}
    (tmp_path / "a.json").write_text(json.dumps(document({"one": whole, "two": cut})))
    (tmp_path / "b.json").write_text(json.dumps(document({"one": cut, "two": whole})))
    merged = runner.open_document([tmp_path / "a.json", tmp_path / "b.json"])
    assert [check["status"] for check in merged["stages"]["facts"].values()] == ["whole", "whole"]
    (tmp_path / "c.json").write_text(json.dumps(document({}) | {"dry_run": True}))
    with pytest.raises(SystemExit, match="rehearsal"):
        runner.open_document([tmp_path / "a.json", tmp_path / "c.json"])


def test_the_table_has_a_row_per_line_and_names_what_was_cut_short():
    line = {"n": 3, "figures": {"ratio": 1.00312345, "kinds": {"a|b": 2}}, "bar": "≤ 1.005", "holds": True}
    checks = {
        "gpt": {"status": "whole", "lines": {"always-on": line}},
        "small": {"status": "cut short", "lines": {}, "error": "exit code None: \n  it hung"},
    }
    table = list(rows(document(checks)))
    assert "| gpt: always-on | 3 | ratio 1.003, kinds {a\\|b 2} | ≤ 1.005 | yes |" in table
    assert "| small | | cut short: it hung | | **no** |" in table
    assert summary(document(checks))["not_whole"] == 1


def test_docs_name_tests_and_checks_that_exist(tmp_path):
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", text)
    assert named
    assert [name for name in named if f"def {name}(" not in sources and not _is_file(name)] == []
    checks = {line.split()[0] for line in run("--list", cwd=tmp_path).stdout.splitlines()}
    stages = {check.partition(".")[0] for check in checks}
    mentioned = set(re.findall(r"`((?:windows|facts|overhead|replay|pairs|ranks)(?:\.[\w-]+)?)`", text))
    assert mentioned - stages - checks == set()
    assert {each.partition(".")[0] for each in mentioned} == stages


def _is_file(name: str) -> bool:
    return any((ROOT / "tests").rglob(f"{name}.py"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["windows", "facts", "overhead", "replay", "pairs", "ranks"])
def test_every_check_of_a_stage_is_rehearsed(tmp_path, stage):
    pytest.importorskip("torch")
    done = run(
        "--dry-run", "-o", "out", "--only", stage, "--limit-s", 3000, "--json", cwd=tmp_path, limit_s=3100
    )
    checks = json.loads(done.stdout)["stages"][stage]
    errors = {name: check["error"] for name, check in checks.items() if check["status"] != "whole"}
    errors |= {
        f"{name}: {line}": said["figures"]["error"]
        for name, check in checks.items()
        for line, said in check["lines"].items()
        if "error" in said["figures"]
    }
    assert not errors
    assert done.returncode == 0


def test_a_rehearsal_has_the_names_that_a_gpu_has():
    pytest.importorskip("torch")
    from gpu_stages.device import FirstGpu, Rehearsal

    names = [{name for name in dir(device) if not name.startswith("_")} for device in (FirstGpu, Rehearsal)]
    assert names[0] == names[1]


def test_a_capture_amid_other_work_is_ended_whatever_happens_in_it(monkeypatch):
    torch = pytest.importorskip("torch")
    from contextlib import nullcontext

    from gpu_stages.device import FirstGpu

    calls = []

    class Graph:
        def capture_begin(self, capture_error_mode):
            calls.append(capture_error_mode)

        def capture_end(self):
            calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with pytest.raises(ZeroDivisionError):
        FirstGpu.captured_amid(object.__new__(FirstGpu), lambda: 1 / 0, "thread_local")
    assert calls == ["thread_local", "end"]


def test_a_recorded_job_that_fails_keeps_no_other_way_from_being_measured(tmp_path, monkeypatch):
    from gpu_stages import overhead

    def one_job(_bench, way, _options, _arguments):
        if way == "default windows":
            raise RuntimeError("ended with -11")
        return {"event_mean_ms": 10.0 + (way == "always-on") * 0.2, "wall_mean_ms": 10.0, "windows": 0}

    monkeypatch.setattr(overhead, "one_job", one_job)
    monkeypatch.setattr(overhead, "supports", lambda _: True)
    here = bench(tmp_path)
    overhead.in_turns(here, "small", 100, 3)
    assert here.lines["default windows failed"]["holds"] is False
    assert here.lines["event: always-on"]["n"] == 3
    assert here.lines["event: always-on"]["holds"] is False
    assert here.lines["wall: always-on"]["holds"] is True
    assert "event: default windows" not in here.lines
