"""The view of a job's life."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpro.dashboards import report
from dpro.dashboards.figures import Figures
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import OfferedRun, Runs, ShownRun
from dpro.errors import InputError
from dpro.extensions.goodput import view
from dpro.extensions.goodput.account import CLASSES
from dpro.extensions.goodput.document import IN_WORDS
from dpro.extensions.goodput.view import (
    MAX_LABELS,
    SHADES,
    VIEW,
    attempt_info,
    class_figure,
    class_info,
    life_info,
    nothing_started,
    progress_info,
)
from dpro.store import open_run, write_manifest
from dpro.verdict.report import make_report
from tests.builders import gpu_job
from tests.lives import WrittenAttempt, job, killed_five_times


def drawn(loaded):
    """The picture."""
    return Figures(loaded).life()


def texts(figure) -> list[str]:
    """What is written into the picture, from left to right."""
    written = [
        (x, text)
        for trace in figure.data
        if trace.type == "scatter" and "text" in trace.mode
        for x, text in zip(trace.x, trace.text, strict=True)
    ]
    return [text for _, text in sorted(written)]


@pytest.fixture
def loaded(tmp_path):
    first = WrittenAttempt(begin=0)
    last = first.trained(10)
    first.checkpoint("save", 4 + 3.01, 0.0, "/c")
    second = WrittenAttempt(begin=last + 10)
    second.checkpoint("load", second.begin + 3.5, 0.0, "/c")
    second.ended(second.trained(8))
    return Loaded(job(tmp_path / "run", [first.ended(last, code=1), second]))


def test_steps_in_a_row_are_one_bar(loaded):
    rows = life_info(loaded, Link(ranks=(0,)))
    trained = rows.filter(rows["class"].is_in(["productive", "repeated"]))
    assert trained.select("attempt", "class", "first_step", "last_step", "lasts_ms").rows() == [
        (0, "productive", 0, 9, 10_000.0),
        (1, "repeated", 3, 9, 7_000.0),
        (1, "productive", 10, 10, 1_000.0),
    ]
    assert rows["rank"].unique().to_list() == [0]
    ends = rows["begin_ms"] + rows["lasts_ms"]
    assert rows["begin_ms"][1:].to_list() == pytest.approx(ends[:-1].to_list())


def test_each_class_is_drawn(loaded):
    assert set(IN_WORDS) == set(CLASSES)
    assert set(IN_WORDS.values()) == set(SHADES)
    figure = drawn(loaded)
    legend = {bar.name.rpartition(" ")[0] for bar in figure.data if bar.type == "bar"}
    assert legend == {"training", "steps done again", "starting", "no process"}
    assert list(figure.layout.yaxis2.categoryarray) == ["rank 1", "rank 0"]


def test_the_legend_has_the_shares_of_the_sentence_though_short_pieces_are_drawn_as_others(
    loaded, monkeypatch
):
    shares: dict[str, float] = {}
    for name, share in class_info(loaded, Link()).select("class", "share").iter_rows():
        shares[IN_WORDS[name]] = shares.get(IN_WORDS[name], 0.0) + share
    monkeypatch.setattr(view, "SEEN", 0.25)
    legend = [bar.name.rpartition(" ") for bar in drawn(loaded).data if bar.type == "bar"]
    assert 1 < len(legend) < len(shares)
    assert all(f"{shares[what]:.0%}" == said for what, _, said in legend)


def test_what_is_drawn_in_similar_colours_has_another_pattern():
    assert len(set(SHADES.values())) == len(SHADES)
    assert SHADES["steps done again"][1] != SHADES["saving checkpoints"][1]
    assert SHADES["no process"][1] != SHADES["waiting for stragglers"][1]


def test_line_of_steps_rises_and_falls_back_to_the_step_that_the_job_went_on_from(loaded):
    progress = progress_info(loaded, Link())
    first, second = (progress.filter(attempt=number) for number in (0, 1))
    assert first.select("done").to_series().to_list() == list(range(11))
    assert first["time_ms"].to_list() == [4000.0 + 1000 * step for step in range(11)]
    assert second["done"].to_list() == list(range(3, 12))
    assert texts(drawn(loaded)) == ["failed", "−7 steps", "finished"]


def test_job_that_was_killed_five_times_says_how_each_attempt_ended_and_what_it_lost(tmp_path):
    loaded = Loaded(job(tmp_path / "run", killed_five_times()))
    attempts = attempt_info(loaded, Link())
    # Checkpoints after steps 5, 10, 15, ...: 12 steps, to 12, then from 10 to 19, nothing, from 15 to 29, ...
    assert attempts.select("first_step", "steps", "repeated", "lost", "label").rows() == [
        (0, 12, 0, 2, "SIGKILL"),
        (10, 9, 2, 4, "SIGKILL"),
        (0, 0, 0, 0, "SIGKILL"),
        (15, 14, 4, 4, "SIGKILL"),
        (25, 6, 4, 1, "SIGKILL"),
        (30, 8, 1, 0, "finished"),
    ]
    assert attempts["words"][1] == "rank 1 ended first, by signal 9 (SIGKILL)"
    assert texts(drawn(loaded)).count("SIGKILL") == 5
    said = str(VIEW.sections["goodput-life"](loaded, Link()))
    assert "The job was started 6 times, 5 attempts did not end well, and 11 steps were done again." in said


def test_a_job_that_hung_is_marked_where_it_stopped_not_where_it_was_killed(repository):
    hung = Loaded(open_run(repository / "sample_traces" / "h200_hang"))
    (attempt,) = attempt_info(hung, Link()).to_dicts()
    last_step_ms = progress_info(hung, Link())["time_ms"].max()
    assert last_step_ms <= attempt["stopped_ms"] < last_step_ms + 100 < attempt["end_ms"] - 10_000
    (end,) = (trace for trace in drawn(hung).data if trace.name == "end of an attempt")
    assert list(end.text) == ["hung"]
    assert end.x[0] == pytest.approx(attempt["stopped_ms"] / 1000)


def test_ends_of_very_many_attempts_are_under_the_pointer_alone(tmp_path):
    attempts = []
    for number in range(MAX_LABELS + 1):
        attempt = WrittenAttempt(begin=20.0 * number)
        attempts.append(attempt.ended(attempt.trained(5), code=1))
    figure = drawn(Loaded(job(tmp_path / "run", attempts)))
    assert texts(figure) == []
    assert any("attempt %{customdata[0]}" in (trace.hovertemplate or "") for trace in figure.data)


def test_report_begins_its_figures_with_the_life_of_a_recorded_job(loaded):
    titles = [title for title, _ in report._figures(loaded, make_report(loaded))]
    assert titles[1:3] == [
        "Where the usual step goes",
        "Life of the job: 31% of its time was training that counts",
    ]


def test_shares_of_classes_are_those_of_the_selected_ranks(loaded):
    classes = class_info(loaded, Link(ranks=(1,)))
    assert classes["share"].sum() == pytest.approx(1)
    (bar,) = class_figure(classes, "dark").data
    assert list(bar.x) == sorted(bar.x, reverse=True)


def test_sections_fill_for_any_selection(loaded):
    assert not nothing_started(loaded, Link())
    for fill in VIEW.sections.values():
        for link in (Link(), Link(ranks=(77,)), Link(ranks=(0,))):
            assert fill(loaded, link)


def test_end_that_is_not_recorded_is_unknown(tmp_path):
    attempt = WrittenAttempt(begin=0)
    attempt.trained(5)
    filled = VIEW.sections["goodput-attempts"](Loaded(attempt.written(tmp_path / "run")), Link())
    assert "how it ended is not recorded" in str(filled)
    assert "did not end well" not in str(filled)


def test_imported_run_says_what_is_missing(tmp_path):
    assert "was not recorded" in nothing_started(Loaded(gpu_job().write(tmp_path / "run")), Link())


def runs_of_one_command(folder, begins) -> list:
    runs = []
    for number, begin in enumerate(begins):
        attempt = WrittenAttempt(begin=begin)
        run = attempt.ended(attempt.trained(5)).written(folder / str(number))
        write_manifest(run.path, replace(run.manifest, command=["train.py"]))
        runs.append(open_run(run.path))
    return runs


def test_runs_that_the_same_command_made_are_one_job_where_that_is_chosen(tmp_path):
    first, _, third = runs_of_one_command(tmp_path, (0, 30, 60))
    write_manifest(third.path, replace(third.manifest, command=["other.py"]))
    shown = Runs(
        ShownRun(Loaded(first)), "0", lambda: [OfferedRun(each, str(tmp_path / each)) for each in "012"]
    )
    loaded, job_of_all = shown.opened.loaded, Link(options={"of": "job"})
    assert attempt_info(loaded, Link()).height == 1
    assert attempt_info(loaded, job_of_all)["begin_ms"].to_list() == [0.0, 30_000.0]
    assert life_info(loaded, job_of_all)["attempt"].unique().sort().to_list() == [0, 1]
    assert "all 2 runs of this command, as one job" in str(VIEW.sections["goodput-life"](loaded, Link()))
    assert class_info(loaded, job_of_all)["share"].sum() == pytest.approx(1)


def test_runs_of_one_command_that_ran_at_the_same_time_are_refused(tmp_path):
    first, second = runs_of_one_command(tmp_path, (0, 2))
    loaded = Loaded(first)
    loaded.offers = lambda: [OfferedRun(run.path.name, str(run.path)) for run in (first, second)]
    with pytest.raises(InputError, match="ran at the same time"):
        life_info(loaded, Link(options={"of": "job"}))


def test_runs_that_cannot_be_opened_and_those_that_still_run_are_no_attempts(tmp_path):
    first, _ = runs_of_one_command(tmp_path, (0, 30))
    offers = [
        OfferedRun("0", str(first.path)),
        OfferedRun("1", str(tmp_path / "1"), lives=True),
        OfferedRun("2", str(tmp_path / "2"), why="no manifest"),
        OfferedRun("3", "s3://bucket/run"),
    ]
    assert [offer.name for offer in offers if offer.is_whole] == ["0"]
