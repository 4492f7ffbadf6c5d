"""Requests of logs, within a recording."""

from pathlib import Path

import polars as pl

from dpro.extensions.serving.recorded import add_logged
from dpro.extensions.serving.requests import RequestLog
from dpro.schema import REQUESTS, conform
from dpro.store import Manifest, open_run, write_manifest, write_part

START = 1_700_000_000_000_000_000  # a date


def log_of(*moments):
    """Requests of (arrival, end) in ns."""
    rows = [{"request": at, "arrival_ns": begin, "end_ns": end} for at, (begin, end) in enumerate(moments)]
    return RequestLog(conform(REQUESTS, pl.DataFrame(rows)), {"requests not JSON": 2}, ["one line"])


def table(run: Path):
    write_manifest(run, Manifest(world_size=1, ranks=[0]))
    return open_run(run).table(REQUESTS)


def test_requests_that_ended_before_the_job_began_are_of_another_run(tmp_path):
    log = log_of((START - 9, START - 1), (START - 9, START + 1), (START + 5, START + 9))
    said = add_logged(tmp_path, log, START)
    assert table(tmp_path).select("request", "end_ns").rows() == [(0, START + 1), (1, START + 9)]
    assert said["skipped"] == [{"requests not JSON": 2}, {"requests that ended before the job began": 1}]
    assert said["warnings"] == ["one line"]


def test_a_log_that_counts_from_its_own_start_is_all_of_this_run(tmp_path):
    add_logged(tmp_path, log_of((5, 9), (6, -1)), START)
    assert table(tmp_path)["arrival_ns"].to_list() == [5, 6]


def test_where_the_engine_was_recorded_itself_a_log_adds_nothing(tmp_path):
    own = log_of((START, START + 9)).requests
    write_part(tmp_path, REQUESTS, "rank00000-1", own)
    said = add_logged(tmp_path, log_of((START, START + 9), (START, START + 8)), START)
    assert table(tmp_path).height == 1
    assert said["warnings"][-1] == "2 requests of logs were not added: the engine's own were recorded"


def test_parts_without_a_request_do_not_keep_a_log_out(tmp_path):
    write_part(tmp_path, REQUESTS, "rank00000-1", REQUESTS.empty())
    add_logged(tmp_path, log_of((START, START + 9)), START)
    assert table(tmp_path).height == 1
