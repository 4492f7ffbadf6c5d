"""`dpro explain` on recorded runs, and the verdicts on real traces beside those of an expert."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.verdicts import BARS, VERDICTS, graded
from dpro.analysis import graphs
from dpro.analysis.analysis import Analysis
from dpro.analysis.summary import health_info
from dpro.cli.analysis import analyse
from dpro.store import open_run
from dpro.verdict.advice import WORTH
from dpro.verdict.verdict import explain
from tests.commands import dpro
from tests.traces import event, write

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
LABELS = ("LIMIT", "FAULT", "TRY", "NOT", "UNSURE", "MORE")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sample", "limit", "ranks", "first"),
    [
        ("healthy", "compute", [], None),
        ("slow_input", "input", [], "input"),
        ("slow_rank", "imbalance", [1], "heal"),
    ],
)
def test_the_samples_are_explained_by_what_was_done_to_them(sample, limit, ranks, first):
    done = dpro("explain", SAMPLES / sample, "--json")
    verdict = json.loads(done.stdout)
    assert verdict["limit"]["kind"] == limit
    assert verdict["faulty_ranks"] == ranks
    assert first is None or verdict["advice"][0]["kind"] == first


@pytest.mark.few(1)
@pytest.mark.parametrize("sample", ["healthy", "slow_input", "slow_rank"])
def test_an_explanation_is_a_screen_of_labelled_lines(sample):
    lines = dpro("explain", SAMPLES / sample).stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(sample)
    assert all(line.split()[0] in LABELS for line in lines[2:] if not line.startswith(" "))


def test_the_last_line_names_commands_with_the_path_that_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my run").symlink_to(SAMPLES / "slow_rank")
    (tmp_path / ("r" * 30)).symlink_to(SAMPLES / "slow_rank")
    said = dpro("explain", "my run").stdout.splitlines()
    assert said[-1] == "MORE   dpro report 'my run' | dpro diagnose 'my run' | dpro whatif 'my run'"
    said = dpro("explain", "r" * 30).stdout.splitlines()  # too long for one line
    assert said[-3:] == [
        f"MORE   dpro report {'r' * 30}",
        f"       dpro diagnose {'r' * 30}",
        f"       dpro whatif {'r' * 30}",
    ]


@pytest.mark.parametrize(
    ("command", "following"),
    [
        (["report"], ["diagnose", "whatif"]),
        (["info"], ["explain"]),
        (["replay"], ["whatif"]),
        (["diagnose"], ["explain"]),
        (["diff", SAMPLES / "healthy"], ["explain"]),
    ],
)
def test_an_answer_ends_with_the_commands_that_lead_on(command, following):
    said = dpro(*command, SAMPLES / "slow_rank").stdout
    lines = said[said.rindex("MORE") :].replace("MORE", "").replace("|", "\n").split("\n")
    named = [line.strip() for line in lines if line.strip()]
    assert named == [f"dpro {name} {SAMPLES / 'slow_rank'}" for name in following]


def test_a_job_that_hung_has_no_answer_that_leads_on_from_its_diagnosis():
    assert "MORE" not in dpro("diagnose", SAMPLES / "h200_hang").stdout


def test_no_command_is_named_that_can_only_fail(traces):
    dumps = traces / "flight_recorder" / "lock_gil_1st"
    assert dpro("explain", dumps).stdout.splitlines()[-1] == f"MORE   dpro diagnose {dumps}"
    assert dpro("report", dumps).returncode == dpro("whatif", dumps).returncode == 1


def test_what_to_record_is_advice_where_nothing_can_be_diagnosed(tmp_path):
    trace = write(
        tmp_path / "rank0.json", [event("overhead", "load", 10, 30), event("overhead", "train", 50, 20)]
    )
    said = dpro("explain", trace).stdout
    assert "\nTRY    1 record operators, CUDA calls and kernels\n" in said
    assert said.count("the run holds no work to replay") == 1
    named = said.partition("MORE")[2].split("dpro ")[1:]
    assert all(dpro(*command.split()).returncode == 0 for command in named)
    assert not any(command.startswith("diagnose") for command in named)


def test_a_path_in_place_of_a_command_is_explained():
    explained = dpro("explain", SAMPLES / "slow_rank")
    assert dpro(SAMPLES / "slow_rank").stdout == explained.stdout


def test_the_page_on_it_shows_what_it_prints(traces, monkeypatch):
    monkeypatch.chdir(traces / "multirank")
    lines = dpro("explain", "torchrec_v100_4r_sleep1s_rank2").stdout.splitlines()
    page = (SAMPLES.parent / "docs" / "explain.md").read_text()
    assert "".join(f"    {line}\n" for line in lines) in page, "\n".join(lines)


def test_the_page_on_findings_shows_what_is_printed():
    said = " ".join(dpro("diagnose", SAMPLES / "slow_rank").stdout.split())
    page = (SAMPLES.parent / "docs" / "diagnosis.md").read_text()
    shown = page[page.index("    slow host work:") : page.index("The cost is")].replace("- …", "…").split("…")
    places = [said.find(" ".join(part.split())) for part in shown]
    assert places[0] == 0
    assert places == sorted(places), said


@pytest.fixture(scope="module")
def verdicts(traces) -> list[tuple[dict, object]]:
    if not VERDICTS.is_file():
        pytest.skip(f"no verdicts of an expert at {VERDICTS}")
    experts = json.loads(VERDICTS.read_text())
    experts = experts["verdicts"] if isinstance(experts, dict) else experts
    return [(expert, explain(analyse(str(traces / expert["source"])))) for expert in experts]


@pytest.mark.slow
def test_verdicts_on_real_traces_are_those_of_an_expert(verdicts):
    agreed = defaultdict(list)
    for expert, verdict in verdicts:
        for check, things in graded(verdict, expert).items():
            agreed[check] += [agrees for agrees, _ in things]
    for check, bar in BARS.items():
        assert 100 * sum(agreed[check]) / len(agreed[check]) >= bar, check


@pytest.mark.slow
def test_no_verdict_contradicts_itself(verdicts):
    for _, verdict in verdicts:
        assert verdict.limit is not None
        assert len(verdict.advice) <= 3
        gains = [(advice.gain_low, advice.gain_high) for advice in verdict.advice if advice.gain_low]
        assert all(0 < low <= high < float("inf") and high >= WORTH for low, high in gains)
        most = max(verdict.alternatives.values())
        assert verdict.limit.gain <= most + 0.001
        assert sum(verdict.shares.values()) == pytest.approx(1.0, abs=0.02)


@pytest.mark.slow
def test_a_large_run_is_explained_as_any_other(monkeypatch, empty_cache):
    whole = explain(Analysis(open_run(SAMPLES / "slow_rank")))
    monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 0)
    by_rank = explain(Analysis(open_run(SAMPLES / "slow_rank")))
    assert by_rank.limit.kind == whole.limit.kind
    assert by_rank.limit.gain == pytest.approx(whole.limit.gain, rel=0.02)
    assert by_rank.faulty_ranks == whole.faulty_ranks
    assert [advice.kind for advice in by_rank.advice] == [advice.kind for advice in whole.advice]


@pytest.mark.few(1)
@pytest.mark.parametrize("large", [False, True])
def test_a_rank_without_steps_is_named_beside_the_others(tmp_path, empty_cache, monkeypatch, large):
    run = shutil.copytree(SAMPLES / "slow_rank", tmp_path / "run")
    next((run / "steps").glob("rank00001*")).unlink()
    whole = explain(Analysis(open_run(SAMPLES / "slow_rank")))
    if large:
        monkeypatch.setattr(graphs, "MIN_LARGE_SPANS", 0)
    verdict = explain(Analysis(open_run(run)))
    assert (verdict.steps, verdict.step_ms) == (whole.steps, pytest.approx(whole.step_ms, rel=0.01))
    assert "no steps are known for rank 1" in verdict.unsure
    assert verdict.limit.kind == "input"  # what rank 0 waits for has no step to be compared in
    for command in () if large else ("whatif", "report"):
        assert dpro(command, run, "--json").returncode == 0


def test_a_job_that_hangs_is_explained_by_what_hangs(traces):
    analysis = Analysis(_dumps(traces / "flight_recorder" / "lock_gil_1st"))
    verdict = explain(analysis)
    assert verdict.limit is None
    assert verdict.faulty_ranks == [9, 14]  # the ranks that were hit
    short = health_info(*analysis.verdict, None)[1]
    for sentence in (verdict.fault, short):
        assert sentence.startswith("The job is stuck. Ranks 9, 14: their host code has not reached the call")
    assert verdict.advice[0].do.startswith("see what ranks 9, 14 do")


def _dumps(folder: Path):
    from dpro.opening import open_path

    return open_path(folder)
