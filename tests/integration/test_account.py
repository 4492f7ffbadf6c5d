"""All commands give one account of a run: one step, one ledger, one limit, one gain of each change."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dpro.account import Gain
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.views.verdict import VIEW
from dpro.detect.findings import HIDDEN
from dpro.documents import plain
from dpro.extensions.mcp.tools import call
from dpro.opening import open_path
from dpro.units import NS_PER_MS
from dpro.verdict.ledger import LIMIT_OF
from dpro.verdict.verdict import Explanation, explain
from dpro.verdict.words import paragraphs_of, worth_in_words
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


def account_of_page(run: Path, folder: Path) -> tuple[dict, str]:
    """The account that the report of a run has as a page, and the page's text."""
    page = folder / "report.html"
    assert dpro("report", run, "--html", page).returncode == 0
    text = page.read_text(encoding="utf-8")
    (embedded,) = re.findall(r'<script type="application/json" id="account">(.*?)</script>', text)
    return json.loads(embedded), html.unescape(text)


def assert_all_other_faces_have(account: dict, run: Path, folder: Path) -> None:
    """Hold the tools of the server, the page of the report and the dashboard to the account of a run."""
    place = str(run.resolve())
    asked = {name: {"run": place} for name in ("explain", "report", "diagnose", "replay", "info", "whatif")}
    for name, arguments in (*asked.items(), ("diff", {"a": place, "b": place})):
        answer = plain(call(name, arguments, [run.resolve().parent]))
        assert json.loads(json.dumps(answer))["account"] == account, name
    of_page, page = account_of_page(run, folder)
    assert of_page == account
    loaded = Loaded(open_path(run))
    explanation = explain(loaded)
    assert json.loads(json.dumps(plain(explanation.account))) == account
    for _, text in paragraphs_of(explanation):
        assert text in page
    assert_the_first_page_shows(explanation, loaded)


def assert_the_first_page_shows(explanation: Explanation, loaded: Loaded) -> None:
    """Hold the panels of the dashboard's first view, and their tables, to what is explained."""
    panels = {name: str(fill(loaded, Link())) for name, fill in VIEW.sections.items()}
    said = dict(paragraphs_of(explanation))
    assert said.get("LIMIT", "") in panels["verdict-short"]
    # A hang is stated at the top of the page alone.
    assert said["FAULT"] in panels["verdict-short"] + panels["verdict-findings"]
    for text in (*explanation.unsure, *explanation.tempting):
        assert repr(text)[1:-1] in " ".join(panels.values())
    for advice in explanation.advice:
        assert repr(advice.do)[1:-1] in panels["verdict-advice"]
        assert worth_in_words(advice).removeprefix(": ") in panels["verdict-advice"]
    account = explanation.account
    entries = VIEW.tables["entries"](loaded, Link())
    drawn = entries.select("cause", "ms", "evidence").rows()
    assert sorted(drawn) == sorted((entry.cause, entry.ms, entry.evidence) for entry in account.entries)
    assert {
        LIMIT_OF.get(row["cause"], row["cause"]) for row in entries.filter("of_limit").iter_rows(named=True)
    } == ({account.limit} if account.entries else set())
    gains = {
        row["edit"]: Gain(row["low"], row["middle"], row["high"])
        for row in VIEW.tables["advice"](loaded, Link()).iter_rows(named=True)
    }
    assert {edit: gain for edit, gain in gains.items() if edit} == account.gains


def assert_costs_are_of_the_step(diagnosis: dict) -> None:
    """Hold what findings cost to the step of the account, but for pauses, and their sentences to the same."""
    step_ms = diagnosis["account"]["step_ms"]
    for finding in diagnosis["findings"]:
        if finding["class"] == "pauses" or any(one["kind"] == HIDDEN for one in finding["observations"]):
            continue
        assert finding["cost_ms_per_step"] == pytest.approx(finding["severity"] * step_ms, abs=1e-4 * step_ms)
        for one in finding["observations"]:
            if one["kind"] == "step-without-it":
                assert one["values"]["step_ns"] == pytest.approx(step_ms * NS_PER_MS, rel=0.02)


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
    assert_costs_are_of_the_step(documents["diagnose"])
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


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["h200_gpt", "slow_rank"])
def test_documents_of_all_commands_have_the_same_account(name):
    account = assert_one_account(SAMPLES / name)
    assert account["recorded_step_ms"] > account["step_ms"]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["h200_hang", "h200_gpt", "slow_rank"])
def test_the_server_the_page_and_the_dashboard_have_the_same_account(name, tmp_path):
    account = answered("explain", SAMPLES / name)["account"]
    assert_all_other_faces_have(account, SAMPLES / name, tmp_path)


def test_findings_of_unusual_steps_cost_a_part_of_the_usual_one(traces):
    diagnosis = answered("diagnose", traces / "multirank" / "torchrec_v100_4r_a2a_ar")
    assert [finding["ranks"] for finding in diagnosis["findings"]] == [[2]]
    assert diagnosis["account"]["left_out"] == 1
    assert_costs_are_of_the_step(diagnosis)


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


@pytest.mark.slow
def test_the_account_is_of_all_steps_whichever_are_selected():
    of_some = answered("whatif", SAMPLES / "slow_rank", "--edit", "no-comm", "--steps", "6")
    assert of_some["account"] == answered("explain", SAMPLES / "slow_rank")["account"]
    assert of_some["baseline_ms"] != of_some["account"]["step_ms"]
