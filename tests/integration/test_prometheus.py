"""A watched job as a real Prometheus sees it: its series, the alert rules, and the queries of the dashboard.

`apt install prometheus` brings the server and `promtool`; without them these tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands import dpro
from tests.jobs import RECORD, ROOT, TORCHRUN, environment, free_port

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="no prometheus: apt install prometheus",
)
PATIENCE_S = 240
# Of each alert, series that raise it and how long they have to.
RAISED = {
    "JobHangs": ('dpro_findings_open{class="hang.host",instance="a:1"}', "1", "0m"),
    "JobStandsStill": ('dpro_still_seconds{instance="a:1"}', "2000", "0m"),
    "JobIsSlow": ('dpro_findings_open{class="slow.host",instance="a:1"}', "1", "5m"),
    "JobLosesTime": ('dpro_goodput{instance="a:1"}', "0.5", "15m"),
}
QUIET = {
    'dpro_findings_open{class="jitter",instance="b:1"}': "1",
    'dpro_findings_open{class="dead.rank",instance="b:1"}': "0",
    'dpro_still_seconds{instance="b:1"}': "100",
    'dpro_goodput{instance="b:1"}': "0.95",
    'dpro_goodput{instance="young:1"}': "0.1",
    'dpro_wall_seconds{instance="young:1"}': "600",
}


def queries() -> list[str]:
    """What the panels of the dashboard ask, of all instances."""
    panels = json.loads(dpro("recipe", "grafana").stdout)["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    return [each.replace("$instance", ".+").replace("$__rate_interval", "30s") for each in asked]


def recipes(folder: Path, **changes: str) -> Path:
    """The recipes for Prometheus as files in a folder, with some texts replaced."""
    for name, file in (("alerts", "dpro-alerts.yml"), ("prometheus", "prometheus.yml")):
        text = dpro("recipe", name).stdout
        for before, after in changes.items():
            text = text.replace(before, after)
        (folder / file).write_text(text)
    return folder / "prometheus.yml"


@needs_prometheus
def test_promtool_takes_the_rules_and_the_settings(tmp_path):
    settings = recipes(tmp_path)
    done = subprocess.run(["promtool", "check", "config", settings], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "4 rules found" in done.stdout


@needs_prometheus
def test_each_alert_is_raised_by_what_it_is_for_when_its_time_is_over_and_by_nothing_else(tmp_path):
    recipes(tmp_path)
    series = [{"series": name, "values": f"{value}x60"} for name, value in QUIET.items()]
    series += [{"series": name, "values": f"{value}x60"} for name, value, _ in RAISED.values()]
    series.append({"series": 'dpro_wall_seconds{instance="a:1"}', "values": "7200x60"})
    checks = []
    for alert, (name, _, since) in RAISED.items():
        labels = dict(
            pair.replace('"', "").split("=") for pair in name.partition("{")[2].rstrip("}").split(",")
        )
        severity = "critical" if since == "0m" else "warning"
        raised = {"exp_labels": labels | {"severity": severity}}
        if since != "0m":
            checks.append({"eval_time": f"{int(since[:-1]) - 1}m", "alertname": alert, "exp_alerts": []})
        checks.append({"eval_time": f"{int(since[:-1]) + 1}m", "alertname": alert, "exp_alerts": [raised]})
    for check in checks:
        for raised in check["exp_alerts"]:
            raised["exp_annotations"] = annotations(check["alertname"], raised["exp_labels"])
    tests = {"rule_files": ["dpro-alerts.yml"], "evaluation_interval": "1m"}
    tests["tests"] = [{"interval": "1m", "input_series": series, "alert_rule_test": checks}]
    (tmp_path / "tests.yml").write_text(json.dumps(tests))  # JSON is YAML
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def annotations(alert: str, labels: dict[str, str]) -> dict[str, str]:
    """Those of an alert, filled in."""
    [_, of_alert] = dpro("recipe", "alerts").stdout.split(f"alert: {alert}\n")
    lines = of_alert.partition("- alert:")[0].splitlines()
    texts = {}
    for key in ("summary", "description"):
        [text] = [line.split(": '", 1)[1].rstrip("'") for line in lines if line.strip().startswith(f"{key}:")]
        for name, value in labels.items():
            text = text.replace(f"{{{{ $labels.{name} }}}}", value)
        texts[key] = text.replace("{{ $value | humanizePercentage }}", "50%")
    return texts


@pytest.mark.slow
@needs_prometheus
def test_prometheus_scrapes_a_job_raises_its_alert_and_every_query_of_the_dashboard_has_series(tmp_path):
    pytest.importorskip("torch")
    watched, served = free_port(), free_port()
    settings = recipes(tmp_path, **{"127.0.0.1:9464": f"127.0.0.1:{watched}", "15s": "1s"})
    slow = ["--steps", "3000", "--slow-rank", "1", "--times", "2", "--since", "30"]
    job = [*TORCHRUN, "--standalone", str(ROOT / "tests" / "slowing.py"), str(tmp_path / "mark"), *slow]
    server = ["prometheus", "--config.file", settings, "--storage.tsdb.path", tmp_path / "data",
              "--web.listen-address", f"127.0.0.1:{served}"]  # fmt: skip
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    command = [*RECORD, "-o", "run", "--no-windows", "--metrics", f"127.0.0.1:{watched}", "--", *job]
    with (
        subprocess.Popen(command, cwd=tmp_path, env=environment(), **quiet) as recording,
        subprocess.Popen(server, cwd=tmp_path, **quiet) as prometheus,
    ):

        def ask(path: str, **asked: str) -> Any:
            url = f"http://127.0.0.1:{served}/api/v1/{path}?{urllib.parse.urlencode(asked)}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]

        try:
            wait_for(lambda: pending(ask("alerts")["alerts"]) == {("JobIsSlow", "slow.host")}, recording)
            left = queries()
            assert len(left) == 11
            deadline = time.monotonic() + PATIENCE_S
            while left:  # an account of the job is made once a minute
                left = [query for query in left if not ask("query", query=query)["result"]]
                assert time.monotonic() < deadline, left
                time.sleep(1)
            [named] = ask("query", query='max_over_time(dpro_rank{class="slow.host"}[5m])')["result"]
            assert named["value"][1] == "1"
            [up] = ask("query", query='up{job="dpro"}')["result"]
            assert up["value"][1] == "1"
        finally:
            prometheus.terminate()
            recording.terminate()


def pending(alerts: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["labels"]["alertname"], each["labels"].get("class", "")) for each in alerts}


def wait_for(condition: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if condition():
                return
        except OSError:  # it does not listen yet
            pass
        assert job.poll() is None, "the job ended"
        assert time.monotonic() < deadline
        time.sleep(0.5)
