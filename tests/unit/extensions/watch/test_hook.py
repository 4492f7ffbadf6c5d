"""The command that is run for findings: for which, how often, with what, and what is kept of it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.detect.findings import Finding
from dpro.detect.findings_log import BEGINS, ENDS, Notice
from dpro.detect.observations import observe
from dpro.errors import UsageError
from dpro.extensions.history.database import OF_RANKS, culprit_of
from dpro.extensions.watch import hook as hooks
from dpro.extensions.watch import policy as policies
from dpro.extensions.watch.command import policy_of, start_watcher, watch
from dpro.extensions.watch.hook import Hook, HookDocument
from dpro.extensions.watch.outlets import CLASSES as REPORTED
from dpro.extensions.watch.policy import (
    CLASSES,
    Action,
    Policy,
    RateLimit,
    Rule,
    decide,
    parse_limit,
    read_rules,
)
from tests.commands import dpro, refused

HOSTS = {0: "n0", 1: "n1", 2: "n2"}
SLOW = Finding("slow.nic", "rank", "1", (1,), 0.5, 0.9, 2e6, (observe("test", "it is slow"),))
RECIPES = Path(hooks.__file__).parent / "recipes"


@pytest.fixture(autouse=True)
def own_history(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DPRO_HISTORY", str(tmp_path / "history.sqlite"))


def notice(finding: Finding = SLOW, event: str = BEGINS) -> Notice:
    return Notice(event, 7, time.time_ns(), 40, finding, "it is over" if event == ENDS else "", "deep")


def offered(run: Path, command: str, *notices: Notice, **rules: Any) -> list[dict[str, Any]]:
    """The log of a hook that was offered some notices."""
    (run / "findings").mkdir(parents=True, exist_ok=True)
    dry_run = rules.pop("dry_run", False)
    given = {
        "classes": ("slow.nic", "slow.link", "hang.mismatch"),
        "action": Action.REPLACE,
        "min_confidence": 0.8,
        "limit": RateLimit(5, 60),
        **rules,
    }
    said: list[str] = []
    hook = Hook(run, Policy(command, (Rule(**given),), dry_run), said.append)
    for each in notices:
        hook.offer(each, HOSTS)
    hook.close()
    log = run / "findings" / "hook.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    assert len(said) == len(lines)
    return lines


def test_the_command_gets_the_finding_as_json_and_in_its_environment(tmp_path) -> None:
    out = tmp_path / "out"
    command = f'cat > {out}; echo "$DPRO_HOST $DPRO_HOSTS $DPRO_RANKS $DPRO_CLASS $DPRO_CONFIDENCE $DPRO_RUN"'
    (line,) = offered(tmp_path / "run", command, notice())
    assert (line["what"], line["exit_code"], line["host"], line["class"]) == ("ran", 0, "n1", "slow.nic")
    assert line["output"] == f"n1 n0,n1,n2 1 slow.nic 0.900 {tmp_path / 'run'}\n"
    document = msgspec.json.decode(out.read_bytes(), type=HookDocument)
    assert (document.host, document.hosts, document.ranks) == ("n1", ["n0", "n1", "n2"], [1])
    assert (document.evidence, document.confidence, document.number) == (["it is slow"], 0.9, 7)


@pytest.mark.parametrize(("finding", "why"), [
    (replace(SLOW, component_kind="one of", component_id="rank 1, link 0 - 1"), "ambiguous: one of"),
    (
        replace(SLOW, component_kind="link", component_id="0 - 1", ranks=(0, 1), part_ranks=(0, 1)),
        "ambiguous: link 0 - 1",
    ),
    (replace(SLOW, class_="hang.mismatch"), "no part of a host is at fault"),
    (replace(SLOW, class_="slow.host"), "slow.host is not among the classes of the policy"),
    (replace(SLOW, confidence=0.5), "its confidence is 0.50, below 0.80"),
])  # fmt: skip
def test_nothing_is_run_for_what_is_ambiguous_or_unsure(tmp_path, finding, why) -> None:
    (line,) = offered(tmp_path, f"touch {tmp_path}/ran", notice(finding), min_confidence=0.8)
    assert line["what"] == "skipped"
    assert why in line["why"]
    assert not (tmp_path / "ran").exists()


@given(
    class_=st.sampled_from([*CLASSES, "imbalance.stage", "imbalance.data", "pauses", "jitter", "warm-up"]),
    kind=st.sampled_from([*OF_RANKS, "host", "one of", "port", "cable", "switch", "group", "job", "stage"]),
    name=st.sampled_from(["1", "rank 1", "0 - 1", "leaf1 > n1:nic1", "n1", "n9", "the network", ""]),
    ranks=st.lists(st.integers(0, 3), max_size=3),
    part=st.lists(st.integers(0, 3), max_size=2),
    confidence=st.floats(0, 1),
)
def test_a_host_is_named_only_where_all_that_a_finding_blames_is_on_it(
    class_: str, kind: str, name: str, ranks: list[int], part: list[int], confidence: float
) -> None:
    """Whatever is found: of what blames several, a part of the fabric or the program nothing is taken out."""
    finding = Finding(class_, kind, name, tuple(ranks), 0.5, confidence, 1e6, (), part_ranks=tuple(part))
    host = culprit_of(finding, HOSTS).host
    if class_ not in CLASSES or kind in ("one of", "port", "cable", "switch", "group", "job", "stage"):
        assert host == ""
    elif kind == "host":
        assert host == (name if name in HOSTS.values() else "")
    else:
        named = {HOSTS.get(rank, "") for rank in (ranks if kind in ("rank", "ranks") else part)}
        assert host == (named.pop() if len(named) == 1 else "")


def test_a_way_of_a_cable_is_no_rank_of_the_same_number(tmp_path) -> None:
    """Rank 1 is on n1; the cable leads to a host whose name ends in the same number."""
    way = replace(SLOW, class_="slow.link", component_kind="link", component_id="leaf1 > x1:nic1")
    (line,) = offered(tmp_path, f"touch {tmp_path}/ran", notice(way))
    assert (line["what"], line["host"]) == ("skipped", "")
    assert "which is not a rank" in line["why"]


@pytest.mark.parametrize("text", ["nosuch", "slow.nic,", "imbalance.data", "slow.nic, dead"])
def test_classes_that_no_finding_with_a_host_has_are_refused(tmp_path, text) -> None:
    for command in (["watch", tmp_path], ["record", "-o", tmp_path / "run", "--on-finding", "true"]):
        end = ["--", "true"] if command[0] == "record" else []
        found = dpro(*command, "--classes", text, *end)
        assert (found.returncode, found.stdout) == (2, "")
        assert "is not one of slow.compute, slow.host, slow.nic" in found.stderr


def test_a_recording_hands_its_rules_to_the_watcher(monkeypatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append((command, env)))
    policy = policy_of("notify 'x y'", None, True, "slow.nic,slow.link", 0.9, "2/1h")
    start_watcher("", "", policy, True, SimpleNamespace(run="RUN"))
    ((command, env),) = started
    assert not any("notify" in word for word in command)  # anyone sees the list of processes
    monkeypatch.setenv("DPRO_ON_FINDING", env["DPRO_ON_FINDING"])
    at = command.index("--classes")
    given = watch.make_context("watch", ["RUN", *command[at:]]).params
    names = ("on_finding", "policy", "dry_run", "classes", "min_confidence", "at_most")
    assert policy_of(**{name: given[name] for name in names}) == policy


def test_nothing_is_run_when_a_finding_is_over_nor_in_a_dry_run(tmp_path) -> None:
    assert offered(tmp_path, f"touch {tmp_path}/ran", notice(event=ENDS)) == []
    (line,) = offered(tmp_path, f"touch {tmp_path}/ran", notice(), dry_run=True)
    assert (line["what"], line["host"]) == ("dry run", "n1")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("history", ["here", "off"])
def test_a_command_is_not_run_more_often_than_it_may_be(tmp_path, monkeypatch, history) -> None:
    if history == "off":
        monkeypatch.setenv("DPRO_HISTORY", "off")
    lines = offered(tmp_path, "true", notice(), notice(), notice(), limit=RateLimit(2, 60))
    # What is skipped is noted at once, what is run when it has ended.
    assert sorted(line["what"] for line in lines) == ["ran", "ran", "skipped"]
    assert any("2 times in the last 60 s" in line["why"] for line in lines)


def test_a_command_of_another_run_counts_too(tmp_path) -> None:
    assert offered(tmp_path / "a", "true", notice(), limit=RateLimit(1, 60))[0]["what"] == "ran"
    assert offered(tmp_path / "b", "true", notice(), limit=RateLimit(1, 60))[0]["what"] == "skipped"


def test_a_command_that_fails_or_does_not_end_is_logged_and_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hooks, "MAX_S", 0.3)
    failed, stuck = offered(tmp_path, "echo no; exit 4", notice()) + offered(
        tmp_path / "b", "echo begun; sleep 60", notice()
    )
    assert (failed["what"], failed["why"], failed["exit_code"], failed["output"]) == (
        "failed", "exit code 4", 4, "no\n"
    )  # fmt: skip
    assert (stuck["what"], stuck["why"], stuck["exit_code"]) == ("failed", "did not end in 0 s", None)
    assert stuck["output"] == "begun\n"


def test_offering_does_not_wait_for_the_command(tmp_path) -> None:
    (tmp_path / "findings").mkdir()
    command = f"while ! test -e {tmp_path}/go; do sleep 0.01; done"
    rule = Rule(("slow.nic",), Action.REPLACE, 0.5, RateLimit(5, 60))
    hook = Hook(tmp_path, Policy(command, (rule,)), lambda _: None)
    hook.offer(notice(), HOSTS)  # returns, though the command waits for what comes after it
    (tmp_path / "go").touch()
    hook.close()
    assert json.loads((tmp_path / "findings" / "hook.jsonl").read_text())["what"] == "ran"


def test_what_a_command_starts_may_outlive_it(tmp_path) -> None:
    command = f"(while ! test -e {tmp_path}/go; do sleep 0.01; done; touch {tmp_path}/end) & echo started"
    (line,) = offered(tmp_path, command, notice())
    assert (line["what"], line["output"]) == ("ran", "started\n")
    (tmp_path / "go").touch()


def test_limits_are_read() -> None:
    assert parse_limit("2/1h") == RateLimit(2, 3600)
    assert parse_limit("1/30m") == RateLimit(1, 1800)
    assert parse_limit("3/d") == RateLimit(3, 86400)
    for wrong in ("1", "x/1h", "1/0h", "1/1w", "-1/1h"):
        with pytest.raises(UsageError, match="--at-most"):
            parse_limit(wrong)


def test_a_dry_run_needs_a_command(tmp_path) -> None:
    run = tmp_path / "run"
    (run / ".recording").mkdir(parents=True)
    assert "--on-finding" in refused(dpro("watch", run, "--dry-run"), 2)


# Policies: which rule decides.

RECIPE = read_rules(RECIPES / "policy.toml")


def decided(
    class_: str, confidence: float = 0.9, no_host: str = "", used: tuple[Action, ...] = ()
) -> Action | None:
    """What the policy of the recipe decides; rules of some actions have no try left."""
    policy = Policy("true", RECIPE)
    lacks = {Action.REPLACE: no_host}
    return decide(policy, class_, confidence, lacks, lambda rule: rule.action not in used).action


@pytest.mark.parametrize(
    ("class_", "facts", "action"),
    [
        ("hang.device", {}, Action.REPLACE),
        ("hang.device", {"no_host": "the job runs on one host"}, Action.STOP),
        ("slow.nic", {"confidence": 0.5}, None),
        ("hang.host", {}, Action.RESTART),
        ("hang.host", {"used": (Action.RESTART,)}, Action.STOP),
        ("hang.mismatch", {}, Action.STOP),
        ("ended.signal", {}, Action.RESTART),
        ("ended.signal", {"used": (Action.RESTART,)}, None),
        ("ended.exception", {}, Action.STOP),
        ("ended.outside", {}, None),
        ("imbalance.data", {}, None),
    ],
)
def test_the_first_rule_decides_that_is_sure_enough_and_has_tries_left(class_, facts, action) -> None:
    assert decided(class_, **facts) is action


@given(
    class_=st.sampled_from([*CLASSES, *REPORTED, *policies.ENDS, "pauses"]),
    confidence=st.floats(0, 1),
    no_host=st.sampled_from(["", "it names none"]),
    dry_run=st.booleans(),
)
def test_no_try_is_taken_but_of_the_rule_that_decides(class_, confidence, no_host, dry_run) -> None:
    taken: list[Rule] = []
    policy = Policy("true", RECIPE, dry_run)
    lacks = {Action.REPLACE: no_host}
    decision = decide(policy, class_, confidence, lacks, lambda rule: not taken.append(rule))
    assert [rule.action for rule in taken] == ([] if dry_run or not decision.action else [decision.action])
    assert bool(decision.why) == (decision.action is None)
    if decision.action is Action.REPLACE:
        assert not no_host


def test_a_job_is_let_alone_until_it_has_begun_again(tmp_path) -> None:
    (tmp_path / "findings").mkdir()
    out = tmp_path / "out"
    command = f"echo $DPRO_ACTION $DPRO_CLASS $DPRO_HOST >> {out}"
    policy = Policy(command, RECIPE, file=tmp_path)
    hook = Hook(tmp_path, policy, lambda _: None)
    ended = replace(SLOW, class_="ended.signal", component_kind="job", component_id="the job")
    for finding, attempt in ((SLOW, 0), (ended, 0), (ended, 1)):
        hook.offer(notice(finding), HOSTS, attempt)
    hook.close()
    assert out.read_text() == "replace slow.nic n1\nrestart ended.signal\n"
    lines = [json.loads(line) for line in (tmp_path / "findings" / "hook.jsonl").read_text().splitlines()]
    assert sorted((line["what"], line["action"]) for line in lines) == [
        ("ran", "replace"), ("ran", "restart"), ("skipped", ""),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[rule]]", "missing required field"),
        ("[[rule]]\non = ['hang.*']\ndo = 'reboot'", "Invalid enum value 'reboot'"),
        ("[[rule]]\non = ['hangs']\ndo = 'stop'", "rule 1: 'hangs' is not one of slow.compute"),
        ("[[rule]]\non = ['ended.exit']\ndo = 'replace'", "'ended.exit' is not one of slow.compute"),
        ("[[rule]]\non = ['slow.compute']\ndo = 'reroute'", "'slow.compute' is not one of slow.link"),
        ("[[rule]]\non = ['hang.*']\ndo = 'stop'\nat_most = '3'", "give a number and a time"),
        ("[[rule]]\non = ['hang.*']\ndo = 'stop'\nmin_confidence = 2", "between 0 and 1"),
        ("[[rule]]\non = ['hang.*']\ndo = 'stop'\nwhen = 1", "unknown field `when`"),
        ("rule", "no policy"),
    ],
)
def test_a_policy_that_is_none_is_refused_before_the_job_begins(tmp_path, text, said) -> None:
    (tmp_path / "policy.toml").write_text(text)
    rules = ["--policy", tmp_path / "policy.toml", "--on-finding", "true"]
    refusal = refused(dpro("record", "-o", tmp_path / "run", *rules, "--", "true"), 2)
    assert said in " ".join(refusal.split())
    assert not (tmp_path / "run").exists()


def test_a_policy_needs_a_command_and_says_by_itself_what_each_rule_allows(tmp_path) -> None:
    (tmp_path / "policy.toml").write_text(dpro("recipe", "policy").stdout)
    rules = ["record", "-o", tmp_path / "run", "--policy", tmp_path / "policy.toml"]
    assert "--policy needs a command" in refused(dpro(*rules, "--", "true"), 2)
    both = refused(dpro(*rules, "--on-finding", "true", "--at-most", "2/1h", "--", "true"), 2)
    assert both.startswith("dpro: --at-most: each rule in")


def test_paths_are_changed_for_a_cable_or_switch_and_the_job_is_not_let_alone_afterwards(tmp_path) -> None:
    (tmp_path / "findings").mkdir()
    out = tmp_path / "out"
    rules = (
        Rule(("slow.*",), Action.REROUTE, 0.8, RateLimit(9, 60)),
        Rule(("slow.nic",), Action.REPLACE, 0.8, RateLimit(9, 60)),
    )
    policy = Policy(f'echo "$DPRO_ACTION $DPRO_PART" >> {out}', rules, file=tmp_path)
    hook = Hook(tmp_path, policy, lambda _: None)
    link = replace(SLOW, class_="slow.link", ranks=(0, 1), part_ranks=())
    for finding in (
        replace(link, component_kind="cable", component_id="l0 - s1"),
        replace(link, component_kind="link", component_id="s1 > l0 #1"),
        replace(link, class_="slow.fabric", component_kind="switch", component_id="s1"),
        replace(link, component_kind="link", component_id="0 - 1"),  # of two ranks: not in the topology
        replace(link, component_kind="link", component_id="l0 > n1:nic0"),  # a port has no other way
        replace(link, component_kind="one of", component_id="cable l0 - s1, switch s1"),
        SLOW,
    ):
        hook.offer(notice(finding), HOSTS)
    hook.close()
    assert out.read_text().splitlines() == ["reroute l0 - s1", "reroute s1 > l0 #1", "reroute s1", "replace "]
    lines = [json.loads(line) for line in (tmp_path / "findings" / "hook.jsonl").read_text().splitlines()]
    assert [line["why"] for line in lines if line["what"] == "skipped"] == [
        "slow.link: link 0 - 1 is no cable or switch of the topology",
        "slow.link: link l0 > n1:nic0 is no cable or switch of the topology",
        "slow.link: one of cable l0 - s1, switch s1 is no cable or switch of the topology",
    ]


# Recipes, with fake binaries that write what they are asked for into `calls`.


def fake(folder: Path, name: str, body: str = "") -> None:
    (folder / "bin").mkdir(exist_ok=True)
    binary = folder / "bin" / name
    binary.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{body}\n')
    binary.chmod(0o755)


def cooked(folder: Path, name: str, **settings: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What a recipe says, and the commands it has run."""
    given = {"DPRO_HOST": "n1", "DPRO_CLASS": "slow.nic", "DPRO_RUN": "/run", **settings}
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PAUSE": "0", **given}
    text = dpro("recipe", name).stdout
    done = subprocess.run(
        text, shell=True, input='{"host": "n1"}', text=True, capture_output=True, env=env, cwd=folder
    )
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_recipes_are_listed_and_each_says_what_it_does() -> None:
    listed = dpro("recipe").stdout.splitlines()
    names = [
        "alerts", "grafana", "kubernetes", "kubernetes-job", "nccl", "policy", "prometheus", "ray", "slurm",
        "torchrun",
    ]  # fmt: skip
    assert [line.split()[0] for line in listed] == names
    assert len(list(RECIPES.iterdir())) == len(listed)
    assert all(len(line) <= 110 for line in listed)
    assert f"there are {', '.join(names)}" in refused(dpro("recipe", "pbs"), 2)


def test_slurm_drains_the_host_and_requeues_the_job_without_it(tmp_path) -> None:
    waits = f'case "$*" in *JobId=*) test -e {tmp_path}/gone || {{ touch {tmp_path}/gone; exit 1; }};; esac'
    fake(
        tmp_path,
        "scontrol",
        f'case "$1" in show) echo "   ReqNodeList=(null) ExcNodeList=n9 X=1";; esac; {waits}',
    )
    done, calls = cooked(tmp_path, "slurm", DPRO_HOST="n1.cluster", JOB="42")
    assert done.returncode == 0, done.stderr
    assert calls == [
        "scontrol show job 42",
        "scontrol update NodeName=n1 State=DRAIN Reason=dpro: slow.nic",
        "scontrol requeuehold 42",
        "scontrol update JobId=42 ExcNodeList=n9,n1",
        "scontrol update JobId=42 ExcNodeList=n9,n1",
        "scontrol release 42",
    ]


@pytest.mark.parametrize(("node", "more"), [("n1", " ReqNodeList="), ("n3", "")])
def test_slurm_lets_a_job_run_elsewhere_that_asks_for_the_host_by_name(tmp_path, node, more) -> None:
    shown = (
        'case "$2" in job) echo "ReqNodeList=n[0-1] ExcNodeList=(null)";; hostnames) echo n0; echo n1;; esac'
    )
    fake(tmp_path, "scontrol", shown)
    done, calls = cooked(tmp_path, "slurm", JOB="42", DPRO_HOST=node)
    assert done.returncode == 0, done.stderr
    assert f"scontrol update JobId=42 ExcNodeList={node}{more}" in calls


@pytest.mark.parametrize(
    ("name", "binary", "action", "call"),
    [
        ("slurm", "scancel", "stop", "scancel 42"),
        ("slurm", "scontrol", "restart", "scontrol requeue 42"),
        (
            "kubernetes",
            "kubectl",
            "stop",
            'kubectl patch job 42 --type=merge --patch={"spec":{"suspend":true}}',
        ),
        ("kubernetes", "kubectl", "restart", "kubectl delete pod --selector=job-name=42 --wait=false"),
    ],
)
def test_a_job_is_stopped_or_begun_again_with_all_its_hosts(tmp_path, name, binary, action, call) -> None:
    fake(tmp_path, binary)
    done, calls = cooked(tmp_path, name, JOB="42", DPRO_HOST="", DPRO_ACTION=action)
    assert done.returncode == 0, done.stderr
    assert calls == [call]


@pytest.mark.parametrize(
    ("action", "more"),
    [
        ("stop", []),
        ("restart", ["ray job submit --no-wait -- sh -c train"]),
        ("replace", ["go n1 ray stop", "ray job submit --no-wait -- sh -c train"]),
    ],
)
def test_ray_stops_the_job_and_submits_it_again(tmp_path, action, more) -> None:
    fake(tmp_path, "ray")
    fake(tmp_path, "go")
    done, calls = cooked(tmp_path, "ray", JOB="x", START="train", LAUNCH="go", DPRO_ACTION=action)
    assert done.returncode == 0, done.stderr
    assert calls == ["ray job stop x", *more]


def test_slurm_moves_the_job_where_draining_is_not_allowed(tmp_path) -> None:
    fake(tmp_path, "scontrol", 'case "$*" in *State=DRAIN*) exit 1;; *show*) echo ExcNodeList=;; esac')
    done, calls = cooked(tmp_path, "slurm", JOB="42")
    assert done.returncode == 0
    assert calls[-2:] == ["scontrol update JobId=42 ExcNodeList=n1", "scontrol release 42"]
    assert "n1 is not drained" in done.stdout


def restart(
    folder: Path, check_exit: int, hosts: str = "n0 n1 n2 n3", **settings: str
) -> tuple[Any, list[str]]:
    (folder / "hosts").write_text(hosts.replace(" ", "\n") + "\n")
    fake(folder, "go", 'shift; sh -c "$1"')
    fake(folder, "dpro", f"cat > {folder}/given; exit {check_exit}")
    given = {"HOSTFILE": "hosts", "NNODES": "3", "LAUNCH": "go", "STOP": "true", **settings}
    done, calls = cooked(
        folder, "torchrun", START=f"echo $HOST_RANK $NNODES $MASTER >> {folder}/started", **given
    )
    started, number = folder / "started", len(done.stdout.partition("starts on ")[2].split())
    deadline = time.monotonic() + 10
    while number and time.monotonic() < deadline:  # the job starts in the background
        lines = started.read_text().splitlines() if started.exists() else []
        if len(lines) == number:
            return done, sorted(lines)
        time.sleep(0.01)
    return done, calls


def test_torchrun_starts_on_a_spare_once_the_check_has_confirmed(tmp_path) -> None:
    done, started = restart(tmp_path, 3)
    assert done.returncode == 0, done.stderr
    assert started == ["0 3 n0", "1 3 n0", "2 3 n0"]
    assert done.stdout.splitlines()[-1] == "the job starts on n0 n2 n3"
    assert (tmp_path / "hosts").read_text().split() == ["n0", "n2", "n3"]
    assert (tmp_path / "hosts.out").read_text() == "n1\n"
    assert (tmp_path / "given").read_text() == '{"host": "n1"}'


@pytest.mark.parametrize("check_exit", [0, 1, 4])
def test_torchrun_keeps_all_hosts_where_the_check_does_not_confirm(tmp_path, check_exit) -> None:
    done, _ = restart(tmp_path, check_exit)
    assert done.stdout.splitlines()[-1] == "the job starts on n0 n1 n2"
    assert (tmp_path / "hosts").read_text().split() == ["n0", "n1", "n2", "n3"]


def test_torchrun_leaves_the_job_alone_where_too_few_hosts_would_be_left(tmp_path) -> None:
    done, calls = restart(tmp_path, 3, "n0 n1 n2")
    assert (done.returncode, calls) == (1, [])
    assert "too few hosts" in done.stdout
    assert restart(tmp_path, 3, "n0 n1 n2", MIN_NODES="2", NNODES="3")[0].stdout.endswith("on n0 n2\n")


def test_kubernetes_cordons_the_node_of_the_pod_and_has_it_made_again(tmp_path) -> None:
    fake(tmp_path, "kubectl", 'case "$1" in get) echo node-7;; esac')
    done, calls = cooked(tmp_path, "kubernetes", NAMESPACE="train")
    assert done.returncode == 0, done.stderr
    assert calls[1:] == ["kubectl cordon node-7", "kubectl delete pod --namespace=train n1 --wait=false"]


def test_kubernetes_cordons_the_host_itself_where_no_pod_has_its_name(tmp_path) -> None:
    fake(tmp_path, "kubectl", 'case "$1" in get) exit 1;; esac')
    done, calls = cooked(tmp_path, "kubernetes")
    assert (done.returncode, calls[1:]) == (0, ["kubectl cordon n1"])


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "ray", "torchrun"])
def test_recipes_for_hosts_refuse_to_change_paths(tmp_path, name) -> None:
    for binary in ("scontrol", "kubectl", "ray", "ssh"):
        fake(tmp_path, binary)
    needs = {"JOB": "1", "START": "true", "STOP": "true", "HOSTFILE": "hosts", "NNODES": "1"}
    done, calls = cooked(tmp_path, name, DPRO_ACTION="reroute", DPRO_HOST="", **needs)
    assert (done.returncode, calls) == (2, [])
    assert "dpro recipe nccl" in done.stdout


# The plan of paths: `dpro topology` is a fake that writes the rules of two leaves.

_NAMES = "# SWITCH, FROM, TO, NEXT\\nl0\\th0:nic0\\th1:nic0\\ts1 #1\\nl1\\th1:nic0\\th0:nic0\\ts1\\n"
_DPRO = f"""[ "$2" != bad ] || exit 1
while [ $# -gt 1 ]; do
    case "$1" in --plan) echo plan >"$2" ;; --rules) printf '{_NAMES}' >"$2" ;; esac
    shift
done"""


def test_a_plan_is_written_with_addresses_and_settings_and_installed_switch_by_switch(tmp_path) -> None:
    fake(tmp_path, "dpro", _DPRO)
    fake(tmp_path, "install", f"cat >> {tmp_path}/installed")
    (tmp_path / "ports").write_text("h0:nic0 10.0.0.1 mlx5_0\nh0:nic1 10.0.0.2 mlx5_1\nh1:nic0 10.0.1.1\n")
    given = {"PLANNED": "run0", "ADDRESSES": "ports", "INSTALL": "install now", "DPRO_RUN": ""}
    done, calls = cooked(tmp_path, "nccl", **given)
    assert (done.returncode, done.stderr) == (0, "")
    out = tmp_path / "nccl-plan"
    rules = ["l0\t10.0.0.1\t10.0.1.1\ts1 #1", "l1\t10.0.1.1\t10.0.0.1\ts1"]
    assert (out / "rules").read_text().splitlines()[1:] == rules
    assert (tmp_path / "installed").read_text().splitlines() == rules
    assert [call for call in calls if call.startswith("install")] == ["install now l0", "install now l1"]
    assert "NCCL_CROSS_NIC=0\n" in (out / "job.env").read_text()
    assert (out / "h0.env").read_text() == "NCCL_IB_HCA==mlx5_0,mlx5_1\n"
    assert {file.name for file in out.iterdir()} == {
        "avoid", "plan.json", "rules", "job.env", "h0.env", "summary",
    }  # fmt: skip


def test_what_findings_name_is_left_out_of_every_later_plan_until_it_is_repaired(tmp_path) -> None:
    fake(tmp_path, "dpro", _DPRO)
    for part in ("l0 - s1", "s2", "l0 - s1"):
        cooked(tmp_path, "nccl", PLANNED="run0", DPRO_ACTION="reroute", DPRO_PART=part, LEFT="0.5")
    _, calls = cooked(tmp_path, "nccl", PLANNED="bad", DPRO_ACTION="reroute", DPRO_PART="s3")
    assert (tmp_path / "nccl-plan" / "avoid").read_text() == "l0 - s1=0.5\ns2=0.5\n"  # s3 has no plan
    assert calls[-2] == "dpro topology /run --paths nccl-plan/plan.json"
    assert calls[-1].endswith("--avoid l0 - s1=0.5 --avoid s2=0.5 --avoid s3=0")
    done, _ = cooked(tmp_path, "nccl", PLANNED="run0", DPRO_ACTION="stop")
    assert done.returncode == 2
