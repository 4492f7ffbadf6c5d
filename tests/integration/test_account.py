"""All commands give one account of a run: one step, one ledger, one limit, one gain of each change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.commands import dpro

SAMPLES = Path(__file__).resolve().parents[2] / "sample_traces"
COMMANDS = ("explain", "report", "diagnose", "replay", "info")
REAL = [
    "multirank/nanogpt_h100_8r_rs_ag", "multirank/param_dlrm_v100_8r", "pp_timeline/primus_pp8",
    "single/h100_bert_pystack.json.gz", "multirank/torchrec_v100_4r_sleep1s_rank2",
]  # fmt: skip


def answered(command: str, *arguments: object) -> dict:
    done = dpro(command, *arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def assert_one_account(run: Path) -> dict:
    """Hold all documents of a run to its account, and return that."""
    documents = {command: answered(command, run) for command in COMMANDS}
    account = documents["explain"]["account"]
    assert account is not None
    whatif = answered("whatif", run, "--edit", "no-comm")
    diff = answered("diff", run, run)
    for document in (*documents.values(), whatif, diff):
        assert document["account"] == account
    assert diff["account_b"] == account
    explanation = documents["explain"]
    for name in ("step_ms", "steps", "left_out"):
        assert account[name] == explanation[name]
    assert diff["a_ms"] == pytest.approx(account["step_ms"], rel=1e-6)
    assert account["limit"] == (explanation["limit"] or {"kind": ""})["kind"]
    assert account["fault"] == explanation["fault"]
    assert account["faulty_ranks"] == explanation["faulty_ranks"]
    assert account["step_low_ms"] <= account["step_ms"] <= account["step_high_ms"]
    assert sum(entry["ms"] for entry in account["entries"]) == pytest.approx(account["step_ms"], rel=1e-6)
    costs = {
        (f"finding {found['class']}", *found["ranks"]): found["cost_ms_per_step"]
        for found in documents["diagnose"]["findings"]
    }
    left_ms = account["step_ms"]
    for entry in account["entries"]:
        if entry["evidence"].startswith("finding "):
            cost_ms = costs[entry["evidence"], *entry["ranks"]]
            assert entry["ms"] == pytest.approx(min(cost_ms, left_ms), rel=1e-3)
        left_ms -= entry["ms"]
    for edit, gain in account["gains"].items():
        (prediction,) = answered("whatif", run, "--edit", edit)["predictions"]
        assert gain == {
            "low": prediction["speedup_low"],
            "middle": prediction["speedup"],
            "high": prediction["speedup_high"],
        }
        (advice,) = (done for done in explanation["advice"] if done["edit"] == edit)
        assert advice["gain_low"] == gain["low"]
        assert advice["gain_high"] == min(gain["high"] or np.inf, 1_000)
    return account


@pytest.mark.parametrize("name", ["slow_rank", "h200_gpt"])
def test_documents_of_all_commands_have_the_same_account(name):
    account = assert_one_account(SAMPLES / name)
    assert account["recorded_step_ms"] > account["step_ms"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["healthy", "slow_input", "h200_graphs", "h200_input", "h200_slow_host"])
def test_documents_of_other_samples_have_the_same_account(name):
    assert_one_account(SAMPLES / name)


@pytest.mark.slow
@pytest.mark.parametrize("source", REAL)
def test_documents_of_real_traces_have_the_same_account(source, traces):
    assert_one_account(traces / source)


def test_a_run_that_hangs_has_an_account_without_a_ledger():
    documents = [answered(command, SAMPLES / "h200_hang") for command in ("explain", "diagnose", "info")]
    account = documents[0]["account"]
    assert all(document["account"] == account for document in documents)
    assert account["entries"] == []
    assert account["fault"] == documents[0]["fault"]


def test_the_account_is_of_all_steps_whichever_are_selected():
    of_some = answered("whatif", SAMPLES / "slow_rank", "--edit", "no-comm", "--steps", "6")
    assert of_some["account"] == answered("explain", SAMPLES / "slow_rank")["account"]
    assert of_some["baseline_ms"] != of_some["account"]["step_ms"]
