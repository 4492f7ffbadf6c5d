"""`dpro serving RUN --edit ...`, and the search under a goal."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from dpro.extensions.serving.engine import Engine, serve
from dpro.extensions.serving.predict import figures_of
from dpro.schema import REQUESTS, conform
from dpro.store import Manifest, write_manifest, write_part
from dpro.table import complete
from tests.commands import dpro
from tests.unit.extensions.serving.test_fit import TRUTH, arrivals


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


@pytest.mark.slow
def test_a_search_lists_what_allows_more_requests_before_the_server_as_it_is(log: Path) -> None:
    out = dpro("serving", log, "--ttft-ms", "1000", "--tpot-ms", "80", "--json").stdout
    found = json.loads(out)["predictions"]
    assert found[0]["edits"]
    assert found[-1]["edits"] == []
    rates = [each["requests_per_s"] for each in found]
    assert rates == sorted(rates, reverse=True)
    assert found[-1]["throughput"] is None
    assert found[0]["throughput"]["middle"] == pytest.approx(rates[0] / rates[-1])


def test_a_goal_is_answered_in_arrivals(log: Path) -> None:
    lines = dpro("serving", log, "--ttft-ms", "0.001").stdout.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("The most arrivals of one engine"))
    assert lines[at + 1].split() == ["0", "arrivals/s", "as", "it", "is"]


def test_another_device_is_predicted_with_a_model_and_the_device_of_the_recording(
    log: Path, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    known = ("--model", tmp_path / "config.json", "--device", "H100")
    answer = json.loads(dpro("serving", log, "--edit", "device:name=H200", *known, "--json").stdout)
    figures = {each["name"]: each for each in answer["predictions"][0]["figures"]}
    assert not answer["predictions"][0]["proven"]
    # Its memory is 1.43 times as fast, its products as fast, and the host is the same.
    assert 1.0 < figures["tpot_p50_ms"]["measured"] / figures["tpot_p50_ms"]["predicted"] < 1.43


def test_requests_of_a_public_trace_are_served_by_the_recorded_engine(log: Path, tmp_path: Path) -> None:
    trace = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    rows = [f"2023-11-16 18:15:{second:02}.6805900,374,44" for second in range(40)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    answer = json.loads(dpro("serving", log, "--edit", f"requests:file={trace},count=30", "--json").stdout)
    figures = {each["name"]: each for each in answer["predictions"][0]["figures"]}
    # 30 answers of 44 tokens, one a second: the last ends a little after 29 s.
    assert figures["tokens_per_s"]["predicted"] == pytest.approx(30 * 44 / 30, rel=0.06)


@pytest.mark.parametrize(
    ("options", "code", "what"),
    [
        (["--edit", "max-batch:requests=x"], 2, "requests must be a whole number"),
        (["--edit", "replicas:count=2", "--ttft-ms", "100"], 2, "not both"),
        (["--ttft-ms", "-1"], 2, "ttft-ms"),
        (["--edit", "kv-cache:tokens=16"], 1, "never served"),
        (["--edit", "tensor-parallel:degree=2"], 1, "--model"),
        (["--edit", "requests:file=nowhere.csv"], 1, "nowhere.csv"),
        (["--edit", "cuda-graph"], 1, "no spans"),
        (["--edit", "cuda-grap"], 2, "no change"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_one_line(
    log: Path, options: list[str], code: int, what: str
) -> None:
    result = dpro("serving", log, *options)
    assert result.returncode == code
    assert what in result.stderr
