"""`dpro serving RUN --edit ...`, and the search under a goal."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from dpro.replay.serving.engine import Engine, serve
from dpro.replay.serving.predict import figures_of
from dpro.schema import REQUESTS, conform
from dpro.store import Manifest, write_manifest, write_part
from dpro.table import complete
from tests.commands import dpro
from tests.unit.replay.serving.test_fit import TRUTH, arrivals


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with 60 requests of an engine that serves four at once."""
    folder = tmp_path_factory.mktemp("served") / "run"
    served = serve(arrivals(60, 4.0), Engine(max_requests=4), TRUTH).requests.with_row_index("request")
    rows = served.with_columns(pl.col("request").cast(pl.Int64), outcome=pl.lit("finished"))
    folder.mkdir()
    write_part(folder, REQUESTS, "log", conform(REQUESTS, complete(REQUESTS, rows)))
    write_manifest(folder, Manifest(world_size=1, ranks=[]))
    return folder


def test_a_larger_batch_is_predicted_from_a_log_alone(log: Path) -> None:
    answer = json.loads(dpro("serving", log, "--edit", "max-batch:requests=16", "--json").stdout)
    (prediction,) = answer["predictions"]
    figures = {each["name"]: each for each in prediction["figures"]}
    truth = figures_of(serve(arrivals(60, 4.0), Engine(max_requests=16), TRUTH).requests)
    assert prediction["proven"]
    assert figures["latency_p50_ms"]["predicted"] < figures["latency_p50_ms"]["measured"]
    assert figures["latency_p50_ms"]["low"] < truth["latency_p50_ms"] < figures["latency_p50_ms"]["high"]


def test_a_change_without_pairs_is_printed_as_unproven(log: Path) -> None:
    out = dpro("serving", log, "--edit", "replicas:count=2").stdout
    assert "replicas:count=2  (unproven)" in out
    assert "tpot_p50_ms" in out


def test_a_search_lists_what_allows_more_requests_before_the_server_as_it_is(log: Path) -> None:
    out = dpro("serving", log, "--ttft-ms", "1000", "--tpot-ms", "80", "--json").stdout
    found = json.loads(out)["predictions"]
    assert found[0]["edits"]
    assert found[-1]["edits"] == []
    rates = [each["requests_per_s"] for each in found]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        (["--edit", "max-batch:requests=x"], 2, "number from 0"),
        (["--edit", "replicas:count=2", "--ttft-ms", "100"], 2, "not both"),
        (["--ttft-ms", "-1"], 2, "ttft-ms"),
        (["--edit", "kv-cache:tokens=16"], 1, "never served"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(
    log: Path, options: list[str], code: int, what: str
) -> None:
    result = dpro("serving", log, *options)
    assert result.returncode == code
    assert what in result.stderr
