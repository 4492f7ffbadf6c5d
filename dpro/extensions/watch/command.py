"""`dpro watch`: diagnose a job while it runs; and `dpro recipe`: print commands that act on findings."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dpro.cli.options import DAY_S, MAX_STEPS, NumberRange
from dpro.cli.output import json_option, print_json, warn
from dpro.errors import DproError, InputError, MissingExtra, Unanswerable, UsageError
from dpro.extensions.history.command import NO_HISTORY
from dpro.words import counted, one_line, whole_number

if TYPE_CHECKING:
    from dpro.collectors.launch.recording import Launch
    from dpro.collectors.launch.start import Request
    from dpro.detect.findings_log import FindingsLog, Notice
    from dpro.extensions.goodput.document import GoodputDocument
    from dpro.extensions.goodput.running import LiveAccount
    from dpro.extensions.watch.hook import Hook
    from dpro.extensions.watch.job import Job
    from dpro.extensions.watch.outlets import Metrics, Webhook
    from dpro.extensions.watch.policy import Policy
    from dpro.extensions.watch.watcher import Watcher


NICE = 10  # the job has priority
LAST_PORT = 65535
ACCOUNT_S = 3600.0  # between two reports of the job's goodput, unless the job begins again
BEGIN_S = 10.0  # how long to wait for a recording to begin
WEBHOOK = "DPRO_WEBHOOK"  # given in the environment, which other users cannot read
ON_FINDING = "DPRO_ON_FINDING"


def _hiding_callback(variable: str, what: str) -> Callable[..., str]:
    """Return a callback that hides an option's value, such as a webhook's URL or a token, at once.

    Args:
        variable: environment variable that may give the value instead.
        what: the value, in words.
    """

    def hide_value(_context: click.Context, _option: click.Parameter, value: str) -> str:
        os.environ.pop(variable, None)  # neither the job nor helpers may see it
        if value and not hide(value):
            warn(f"{what} is visible in the process list: use the environment variable {variable} instead")
        return value

    return hide_value


_OUTLETS = (
    click.Option(["--webhook"], metavar="URL", default="", envvar=WEBHOOK,
        callback=_hiding_callback(WEBHOOK, "the URL of --webhook"),
        help="Post each finding to URL when it begins and ends: as JSON, or as text to Slack, Teams and "
        f"others (extra `notify`). Can also be set by ${WEBHOOK}.",
    ),
    click.Option(["--ask/--no-ask"], default=True, show_default=True,
        help="Ask the job for one deep window, within its --budget, when a rank turns late or the job slows "
        "down.",
    ),
    click.Option(["--metrics"], metavar="[HOST:]PORT", default="",
        help="Serve Prometheus metrics at /metrics; without HOST, only to this machine.",
    ),
    click.Option(["--on-finding", "on_finding"], metavar="CMD", default="", envvar=ON_FINDING,
        callback=_hiding_callback(ON_FINDING, "the command of --on-finding"),
        help="Run CMD when a finding names exactly one host; never if it might be another host.",
    ),
    click.Option(["--policy"], metavar="FILE", type=click.Path(path_type=Path),
        help="Run CMD to stop, restart or move the job, by the rules in FILE (`dpro recipe policy`).",
    ),
    click.Option(["--dry-run"], is_flag=True, help="Only report when CMD would run."),
    click.Option(["--classes"], metavar="LIST", show_default=True,
        default="slow.compute,slow.nic,slow.link,hang.device,dead.rank",
        help="Finding classes that run CMD.",
    ),
    click.Option(["--min-confidence"], type=NumberRange(0, 1), default=0.8, show_default=True,
        help="Minimum confidence of a finding that runs CMD.",
    ),
    click.Option(["--at-most"], metavar="N/TIME", default="1/1h", show_default=True,
        help="Rate limit of CMD, across all runs: 2/1h, 1/30m, 3/d.",
    ),
)  # fmt: skip


# Of `dpro record`, which watches the job while it records.
OPTIONS_OF_RECORD = (
    click.Option(["--watch"], is_flag=True, help="Report hangs and slowdowns on stderr while the job runs."),
    *_OUTLETS,
)


def watch_recording(request: Request, given: Mapping[str, Any]) -> None:
    """Watch a recording if an option asks for it.

    Raises:
        UsageError, MissingExtra: as from `check_outlets` and `policy_of`.
    """
    webhook, metrics = given["webhook"], given["metrics"]
    check_outlets(webhook, metrics)
    policy = policy_of(*(given[name] for name in _HOOK_OPTIONS))
    if given["watch"] or webhook or metrics or policy:
        ask = given["ask"] and request.options.windows
        request.beside.append(partial(start_watcher, webhook, metrics, policy, ask))


@click.command(params=[*_OUTLETS])
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--no-history", "history", flag_value=False, default=True, help=NO_HISTORY)
@click.option(
    "--interval", "look_s", type=NumberRange(0.1, DAY_S), default=1.0, show_default=True, metavar="SECONDS",
    help="Time between two checks.",
)  # fmt: skip
@click.option("--alone", is_flag=True, hidden=True, help="Leave if another process watches the run.")
@click.option(
    "--window",
    "windows",
    type=click.IntRange(0, MAX_STEPS),
    multiple=True,
    hidden=True,
    help="Say what deep windows show, and leave.",
)
@json_option
def watch(
    run: Path,
    webhook: str,
    metrics: str,
    ask: bool,
    look_s: float,
    alone: bool,
    windows: tuple[int, ...],
    as_json: bool,
    history: bool,
    **hook_options: Any,
) -> None:
    """Report hangs and slowdowns while a job runs.

    \b
    dpro watch RUN                         on any machine that sees the folder
    dpro watch RUN --json                  one finding per line
    dpro watch RUN --webhook https://…     also to a scheduler, as JSON
    dpro watch RUN --webhook slack://…     also to a chat or a pager, as text
    dpro watch RUN --metrics 9464          also to Prometheus on this machine
    dpro watch RUN --metrics 0.0.0.0:9464  also to Prometheus on any machine
    dpro watch RUN --on-finding ./take-out.sh --dry-run
    dpro watch RUN --on-finding "$(dpro recipe slurm)" --policy policy.toml

    Each finding is reported when it begins and when it ends, and is kept in RUN. A summary of the job's
    goodput follows each restart and every hour (`dpro goodput RUN` prints it at any time). The job must have
    been started with `dpro record`. The command ends with the job.

    When a rank turns late or the job slows down, the job is asked for one deep window, to show why. It is
    put off until the job's `--budget` pays for it. Watching adds nothing else to the job; with `--no-ask`
    not even that.

    --on-finding runs CMD for a finding that names one host. With --policy, rules decide which findings, and
    which ends of the job, have CMD stop it, restart it, replace a host, or change paths. CMD gets the
    finding as JSON on its standard input, and DPRO_ACTION, DPRO_HOST, DPRO_PART, DPRO_HOSTS, DPRO_RANKS,
    DPRO_CLASS, DPRO_CONFIDENCE and DPRO_RUN in its environment. `dpro recipe` has such commands for Slurm,
    torchrun, Kubernetes, Ray and NCCL.
    RUN/findings/hook.jsonl logs each CMD that ran, and why others did not.
    """
    from dpro.detect.findings_log import OpenFindings, read_log
    from dpro.extensions.goodput.running import LiveAccount
    from dpro.extensions.watch.evidence import open_log
    from dpro.extensions.watch.hook import Hook
    from dpro.extensions.watch.outlets import Webhook
    from dpro.extensions.watch.request import WindowRequests
    from dpro.extensions.watch.watcher import Watcher, watch

    if windows:
        _look_at_windows(run.resolve(), windows)
        return
    check_outlets(webhook, metrics)
    policy = policy_of(**hook_options)
    say = None if as_json else _say
    _wait_for_recording(run, say or _ignore)
    server = _serve(metrics)
    log = open_log(run)
    if alone and not log.is_writer:
        return
    # Starts its thread before this process is nice.
    hook = Hook(run, policy, warn_of_hook) if policy else None
    with suppress(OSError):
        os.nice(NICE)
    findings = OpenFindings()
    if log.is_writer:
        findings.resume(read_log(run))
    report_window = _ignore if as_json else _say_when
    requests = WindowRequests(run.resolve(), report_window) if ask and log.is_writer else None
    watcher = Watcher(run.resolve(), findings, log.folder if log.is_writer else None, requests)
    posts = Webhook(webhook) if webhook else None
    report = _reporter(run, log, posts, server, as_json)

    def pass_on(notice: Notice) -> None:
        hosts = dict(watcher.job.workers.select("rank", "host").iter_rows())
        if history and not notice.why:
            notice = _with_history(notice, hosts, run)
        report(notice)
        if hook is not None:
            hook.offer(notice, hosts, watcher.job.attempt)

    complain = _complainer()
    begins = None if as_json or alone else partial(watched_in_words, run)
    after_look = _after_look(server, LiveAccount(run.resolve()), say, begins)
    watch(watcher, look_s, pass_on, after_look, complain)
    if hook is not None and policy is not None and policy.once:
        _offer_end(hook, watcher, complain)
    for outlet in (posts, hook):
        if outlet is not None:
            outlet.close()
    if posts is not None and posts.lost:
        warn(f"--webhook did not receive {posts.lost} of the reports above")


def _offer_end(hook: Hook, watcher: Watcher, complain: Callable[[Exception], None]) -> None:
    """Let a policy decide about a job that did not end normally."""
    from dpro.analysis.analysis import Analysis
    from dpro.detect.findings import Finding
    from dpro.detect.findings_log import BEGINS, Notice
    from dpro.detect.observations import observe
    from dpro.extensions.watch.policy import class_of_end
    from dpro.opening import ensure_finished
    from dpro.store import open_run

    job = watcher.job
    try:
        ensure_finished(job.run)
        analysis = Analysis(open_run(job.run))
        class_, end = class_of_end(analysis), analysis.end
    except DproError as error:
        complain(error)
        return
    if class_:
        said = observe("end", end.sentence or "")
        finding = Finding(class_, "job", "the job", tuple(end.ranks), 0.0, 1.0, 0.0, (said,))
        hosts = dict(job.workers.select("rank", "host").iter_rows())
        hook.offer(Notice(BEGINS, 0, time.time_ns(), job.step, finding, "", "end"), hosts, job.attempt)


def _with_history(notice: Notice, hosts: dict[int, str], run: Path) -> Notice:
    """Add the history of its host in earlier runs to a notice."""
    from dpro.extensions.history.database import with_history

    (finding,) = with_history([notice.finding], hosts, run, notice.time_ns)
    return replace(notice, finding=finding)


def _look_at_windows(run: Path, windows: tuple[int, ...]) -> None:
    """Print what deep windows show, as JSON; runs in a process that a watcher started."""
    from dpro.extensions.watch.deep import WindowFindings, diagnose_windows
    from dpro.opening import readers

    try:
        answer = diagnose_windows(run, windows, readers())
    except DproError as error:
        answer = WindowFindings(error=str(error))
    print_json(answer)


def watched_in_words(run: Path, job: Job) -> str:
    """Return what is watched and how it moves: `watching RUN: 2 ranks, the latest step is 49, 66 s ago`."""
    if not job.tails:
        return f"dpro: watching {run}: no process of it trains yet"
    ranks = counted(len({tail.process.rank for tail in job.tails.values()}), "rank")
    latest = f"the latest step is {job.step}, {job.still_s:,.0f} s ago" if job.step >= 0 else "no step yet"
    return f"dpro: watching {run}: {ranks}, {latest}"


def _wait_for_recording(run: Path, say: Callable[[str], None]) -> None:
    """Wait up to `BEGIN_S` for a recording to begin.

    Args:
        say: called with a line if there is none yet.

    Raises:
        InputError: there is none.
    """
    from dpro.collectors.launch.recording import launches

    deadline = time.monotonic() + BEGIN_S
    if not run.exists():
        say(f"dpro: waiting {BEGIN_S:.0f} s for {run} to appear")
    while not launches(run.resolve()):
        if time.monotonic() > deadline or (run / "manifest.json").exists():
            what = "is not being recorded now; `dpro diagnose` reads a run whose job has ended"
            raise InputError(f"{run}: {what}" if run.exists() else f"{run}: no such file or folder")
        time.sleep(0.1)


def check_outlets(webhook: str, metrics: str) -> None:
    """Check the outlets of findings.

    Args:
        webhook: a URL, or empty.
        metrics: a port, or an address and a port; or empty.

    Raises:
        UsageError: one of them is invalid.
        MissingExtra: one of them needs a library that is not installed.
    """
    if webhook:
        from dpro.extensions.watch.outlets import chat_of

        chat_of(webhook)
    port = metrics.rpartition(":")[2]
    if metrics and not 0 <= whole_number(port) <= LAST_PORT:
        raise UsageError(f"--metrics {metrics}: give a port, or an address and a port")
    if metrics and find_spec("prometheus_client") is None:
        raise MissingExtra("prometheus-client", "watch")


def start_watcher(webhook: str, metrics: str, policy: Policy | None, ask: bool, recording: Launch) -> None:
    """Start `dpro watch` beside a job that is about to begin; it reports on the stderr of this process.

    Args:
        webhook: a URL that gets each finding, or empty.
        metrics: address to serve metrics for Prometheus at, or empty.
        policy: when to run a command for findings; None for never.
        ask: whether the watcher may request deep windows.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess
    import sys

    command = [sys.executable, "-m", "dpro", "watch", str(recording.run), "--alone"]
    command += [] if ask else ["--no-ask"]
    secrets = {WEBHOOK: webhook, ON_FINDING: policy.command if policy else ""}
    given = {name: secret for name, secret in secrets.items() if secret}
    subprocess.Popen(
        [*command, *(["--metrics", metrics] if metrics else []), *(as_arguments(policy) if policy else [])],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"POLARS_MAX_THREADS": "1"} | given,
    )  # fmt: skip


def _serve(where: str) -> Metrics | None:
    from dpro.extensions.watch.outlets import Metrics

    if not where:
        return None
    host, _, port = where.rpartition(":")
    try:
        return Metrics(host.strip("[]"), int(port))
    except OSError as error:
        raise UsageError(f"--metrics {where}: {error.strerror or error}") from error


def _reporter(
    run: Path, log: FindingsLog, hook: Webhook | None, server: Metrics | None, as_json: bool
) -> Callable[[Notice], None]:
    """Return a function that logs, prints and sends each notice."""
    from dpro.detect.findings_log import watch_document

    def report(notice: Notice) -> None:
        try:
            log.write(notice)
        except OSError as error:
            warn(f"{log.folder}: {error.strerror or error}")
        document = watch_document(run, notice)
        if as_json:
            print_json(document)
        else:
            click.echo("\n".join(in_words(notice)), err=True)
        if hook is not None:
            hook.post(document, [line.removeprefix("dpro: ") for line in in_words(notice)])
        if server is not None and not notice.why:
            server.begins(notice.finding)

    return report


def _complainer() -> Callable[[Exception], None]:
    """Return a function that warns of a failed look, once for each message."""
    said: set[str] = set()

    def complain(error: Exception) -> None:
        failed = "" if isinstance(error, Unanswerable) else f"a look failed: {type(error).__name__}: "
        line = f"{failed}{error}".partition("\n")[0]
        if line not in said:
            said.add(line)
            warn(line)

    return complain


def _say(line: str) -> None:
    click.echo(line, err=True)


def _say_when(line: str) -> None:
    from dpro.detect.findings_log import time_of_day

    _say(f"dpro: {time_of_day(time.time_ns())} {line}")


def _ignore(_line: str) -> None:
    """Print nothing: with --json, only findings are printed."""


def _after_look(
    server: Metrics | None,
    life: LiveAccount,
    say: Callable[[str], None] | None,
    begins: Callable[[Job], str] | None = None,
) -> Callable[[Watcher], None]:
    """Return a function that runs after each look, to report on the job and update the metrics.

    It reports the job's goodput after a restart and once an hour, and its limit when that changes.

    Args:
        begins: returns what to say after the first look; None for nothing.
    """
    said_s, attempts, limit = time.monotonic(), 1, ""

    def seen(watcher: Watcher) -> None:
        nonlocal said_s, attempts, limit
        if say is not None and begins is not None and watcher.looks == 1:
            say(begins(watcher.job))
        if say is not None and watcher.deep.limit_kind not in ("", limit):
            limit = watcher.deep.limit_kind
            say(f"What limits the job is {watcher.deep.limit}")
        if life.look() and life.latest is not None:
            again = len(life.latest.attempts) > attempts
            if say is not None and (again or time.monotonic() - said_s > ACCOUNT_S):
                said_s, attempts = time.monotonic(), len(life.latest.attempts)
                say(account_in_words(life.latest))
        if server is not None:
            numbers = {
                "ranks": len(watcher.job.tails),
                "steps": watcher.job.step + 1,
                "still_seconds": round(watcher.job.still_s, 1),
                "looks": watcher.looks,
            } | _account_numbers(life.latest)
            server.update(watcher.findings.findings, numbers)

    return seen


def _account_numbers(account: GoodputDocument | None) -> dict[str, float]:
    """Return the metrics that Prometheus gets from the account of a job; empty without one."""
    if account is None:
        return {}
    return {
        "goodput": account.goodput,
        "ettr": account.ettr,
        "attempts": len(account.attempts),
        "wall_seconds": account.wall_s,
    }


def account_in_words(account: GoodputDocument) -> str:
    """Word the account of a job so far, in one line."""
    from dpro.detect.findings_log import time_of_day
    from dpro.extensions.goodput.document import in_words

    return f"dpro: {time_of_day(time.time_ns())} so far: {in_words(account)}"


def in_words(notice: Notice) -> list[str]:
    """Return a notice and its evidence as lines of text."""
    from dpro.detect.findings_log import time_of_day
    from dpro.detect.words import describe

    when = time_of_day(notice.time_ns)
    if notice.why:
        return [f"dpro: {when} over: {notice.finding.title}: {notice.why}"]
    described = describe(notice.finding)
    return [f"dpro: {when} {described.headline}", *(f"dpro:   {line}" for line in described.details)]


# Hides words of the command line, such as the address of a webhook, from the process list.

_PROCESS = Path("/proc/self")
_ARG_START, _ARG_END = 45, 46  # fields 48 and 49 in proc(5), counted in `stat` after the process's name


def hide(word: str) -> bool:
    """Overwrite every occurrence of a word in this process's command line.

    Returns:
        Whether the process list no longer shows it.
    """
    secret = word.encode(errors="surrogateescape")
    try:
        facts = (_PROCESS / "stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(facts[_ARG_START]), int(facts[_ARG_END])
        with (_PROCESS / "mem").open("r+b", buffering=0) as memory:
            memory.seek(begin)
            words = memory.read(end - begin)
            memory.seek(begin)
            memory.write(words.replace(secret, b"*" * len(secret)))
    except (OSError, ValueError, IndexError):
        pass  # whether it worked is checked below
    return secret not in _shown()


def _shown() -> bytes:
    try:
        return (_PROCESS / "cmdline").read_bytes()
    except OSError:  # this system has no /proc
        return b""


# When to run a command for findings.


_OF_ONE_RULE = ("classes", "min_confidence", "at_most")
_HOOK_OPTIONS = ("on_finding", "policy", "dry_run", *_OF_ONE_RULE)


def policy_of(
    on_finding: str,
    policy: Path | None,
    dry_run: bool,
    classes: str,
    min_confidence: float,
    at_most: str,
) -> Policy | None:
    """Return when to run a command: by rules in a file, or one that replaces hosts; None without a command.

    Args:
        on_finding: for the shell, or empty.
        dry_run: whether to report only that it would run.

    Raises:
        InputError: the file cannot be read.
        UsageError: a rule, a class or the limit is invalid, the command is missing, or options of a rule are
            given beside the file.
    """
    from dpro.extensions.watch.policy import (
        CLASSES,
        Action,
        Policy,
        Rule,
        parse_classes,
        parse_limit,
        read_rules,
    )

    rule = Rule(
        parse_classes([word.strip() for word in classes.split(",")], CLASSES), Action.REPLACE,
        min_confidence, parse_limit(at_most),
    )  # fmt: skip
    if not on_finding and (dry_run or policy):
        needs = "--dry-run" if dry_run else "--policy"
        raise UsageError(f"{needs} needs a command: add --on-finding CMD")
    if policy is None:
        return Policy(on_finding, (rule,), dry_run) if on_finding else None
    context = click.get_current_context()
    for name in _OF_ONE_RULE:
        if context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT):
            raise UsageError(f"--{name.replace('_', '-')}: each rule in {policy} sets its own")
    return Policy(on_finding, read_rules(policy), dry_run, policy.resolve())


def as_arguments(policy: Policy) -> list[str]:
    """Return a policy as arguments of `dpro watch`, without the command, which other users must not see."""
    tried = ["--dry-run"] if policy.dry_run else []
    if policy.file:
        return ["--policy", str(policy.file), *tried]
    (rule,) = policy.rules
    return [
        "--classes", ",".join(rule.classes),
        "--min-confidence", str(rule.min_confidence),
        "--at-most", f"{rule.limit.most}/{rule.limit.window_s}s",
        *tried,
    ]  # fmt: skip


def warn_of_hook(what: str) -> None:
    """Report on stderr what was done about a finding."""
    click.echo(f"dpro: {one_line(what)}", err=True)


@click.command()
@click.argument("name", required=False)
def recipe(name: str | None) -> None:
    """Print scripts and settings for `dpro watch`: commands for --on-finding, settings for --metrics.

    \b
    dpro recipe                     list all recipes
    dpro recipe slurm               print one, with its purpose and settings
    dpro watch RUN --on-finding "$(dpro recipe slurm)"
    dpro recipe slurm > out.sh      to edit; then --on-finding 'sh out.sh'
    dpro recipe alerts > dpro-alerts.yml
    """
    recipes = _recipes()
    if name is None:
        for title, text in recipes.items():
            click.echo(f"{title:<15} {_about(text)}")
    elif name in recipes:
        click.echo(recipes[name], nl=False)
    else:
        raise UsageError(f"no recipe {name!r}: there are {', '.join(recipes)}")


def _recipes() -> dict[str, str]:
    """Return the text of each recipe, by name."""
    from importlib.resources import files

    folder = files("dpro.extensions.watch").joinpath("recipes")
    texts = {file.name.partition(".")[0]: file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return dict(sorted(texts.items()))


def _about(text: str) -> str:
    """Return the description of a recipe: its first line, or a key of its JSON."""
    if text.startswith("{"):
        return str(json.loads(text)["description"])
    return text.partition("\n")[0].lstrip("# ")
