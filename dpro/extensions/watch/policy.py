"""The policy of a watch: for which finding, or which end of a job, to stop, restart, move or reroute the job.

Takes rules from options or a TOML file; returns a `PolicyDecision` for each finding that begins, and for the
end of the job. The first rule decides that covers the class, whose confidence is reached, and that has tries
left; if there is none, the decision says why nothing is done. To replace a host, a finding must name exactly
one; to reroute, exactly one cable or switch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dpro.errors import InputError, UsageError

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.detect.findings import Finding

# Classes that may name a host; all others blame the work or the program.
CLASSES = (
    "slow.compute", "slow.host", "slow.nic", "slow.link", "slow.fabric",
    "hang.host", "hang.device", "hang.rank", "hang.comm", "dead.rank",
)  # fmt: skip
OUTSIDE, EXCEPTION, MEMORY, SIGNAL, EXIT = (
    "ended.outside", "ended.exception", "ended.memory", "ended.signal", "ended.exit",
)  # fmt: skip
ENDS = (OUTSIDE, EXCEPTION, MEMORY, SIGNAL, EXIT)  # of jobs that did not end normally
DEFAULT_LIMIT = "1/1h"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LIMIT = re.compile(r"(\d+)/(\d*)([smhd])")


class Action(StrEnum):
    """What to do with a job: end it, restart it, restart it without one of its hosts, or change its paths."""

    STOP = "stop"
    RESTART = "restart"
    REPLACE = "replace"
    REROUTE = "reroute"


class RateLimit(NamedTuple):
    """How often something may be done in a time window."""

    most: int
    window_s: int


@dataclass(frozen=True)
class Rule:
    """An action for findings of some classes.

    Attributes:
        classes: of findings or ends, with wildcards `*` and `?` as for file names.
        limit: how often, over all watchers of this user with this policy.
        name: of the rule in its policy; empty for an only rule.
    """

    classes: tuple[str, ...]
    action: Action
    min_confidence: float
    limit: RateLimit
    name: str = ""

    def is_about(self, class_: str) -> bool:
        """Return whether the rule covers a class."""
        return any(fnmatchcase(class_, pattern) for pattern in self.classes)


@dataclass(frozen=True)
class Policy:
    """When to run the command of a watch.

    Attributes:
        command: for the shell.
        rules: the first applicable one decides.
        dry_run: whether to report only that the command would run.
        file: file with the rules; None for the rule given by options.
    """

    command: str
    rules: tuple[Rule, ...]
    dry_run: bool = False
    file: Path | None = None

    @property
    def once(self) -> bool:
        """Whether the command runs only once for each start of a job."""
        return self.file is not None

    @property
    def tries_of(self) -> str:
        """Name under which tries of the rules are counted: the file, or the command."""
        return str(self.file or self.command)


class PolicyDecision(NamedTuple):
    """What to do about a finding.

    Attributes:
        action: None for nothing.
        why: why nothing is done.
    """

    action: Action | None
    why: str = ""


def decide(
    policy: Policy,
    class_: str,
    confidence: float,
    lacks: Mapping[Action, str],
    may_act: Callable[[Rule], bool],
) -> PolicyDecision:
    """Decide what to do about a finding.

    Args:
        lacks: why it names no host to replace, or no part to reroute around; empty if it names one.
        may_act: takes one of the tries that a rule has left; returns False if none is left.
    """
    why = ""
    for rule in policy.rules:
        if not rule.is_about(class_):
            continue
        if lacks.get(rule.action):
            why = why or lacks[rule.action]
        elif confidence < rule.min_confidence:
            why = why or f"its confidence is {confidence:.2f}, below {rule.min_confidence:.2f}"
        elif not policy.dry_run and not may_act(rule):
            tries = f"{rule.limit.most} times in the last {rule.limit.window_s} s"
            why = why or f"the command was run {tries} already"
        else:
            return PolicyDecision(rule.action)
    why = why or lacks[Action.REPLACE] or f"{class_} is not among the classes of the policy"
    return PolicyDecision(None, why)


def parse_limit(text: str, of: str = "--at-most") -> RateLimit:
    """Parse `2/1h`, `1/30m`, `1/d`.

    Raises:
        UsageError: the text is not a limit.
    """
    match = _LIMIT.fullmatch(text)
    if not match or int(match[2] or 1) == 0:
        raise UsageError(f"{of} {text}: give a number and a time, as 1/1h or 3/d (s, m, h, d)")
    return RateLimit(int(match[1]), int(match[2] or 1) * _SECONDS[match[3]])


def parse_classes(words: Sequence[str], choices: Sequence[str], of: str = "--classes") -> tuple[str, ...]:
    """Check classes, or patterns of classes.

    Raises:
        UsageError: one of them neither is one of the choices nor matches one.
    """
    for word in words:
        if not any(fnmatchcase(class_, word) for class_ in choices):
            raise UsageError(f"{of}: {word!r} is not one of {', '.join(choices)}")
    return tuple(words)


class _RuleInFile(msgspec.Struct, forbid_unknown_fields=True):
    on: list[str]
    do: Action
    min_confidence: float = 0.8
    at_most: str = DEFAULT_LIMIT


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[_RuleInFile]


def read_rules(path: Path) -> tuple[Rule, ...]:
    """Read the rules of a file such as `dpro recipe policy` prints.

    Raises:
        InputError: it cannot be read.
        UsageError: it is not TOML, has keys unknown to rules, or a class or a limit is unknown.
    """
    from dpro.detect.findings import NETWORK
    from dpro.extensions.watch.outlets import CLASSES as REPORTED

    try:
        read = msgspec.toml.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: no policy: {error} (`dpro recipe policy` prints one)") from error
    others = dict.fromkeys((*CLASSES, *REPORTED, *ENDS))
    rules = []
    for number, rule in enumerate(read.rule, 1):
        of = f"{path}: rule {number}"
        choices = {Action.REPLACE: CLASSES, Action.REROUTE: NETWORK}.get(rule.do, [*others])
        classes = parse_classes(rule.on, choices, of)
        if not 0 <= rule.min_confidence <= 1:
            raise UsageError(f"{of}: min_confidence is between 0 and 1")
        limit = parse_limit(rule.at_most, of)
        rules.append(Rule(classes, rule.do, rule.min_confidence, limit, f"#{number}"))
    return tuple(rules)


def class_of(finding: Finding) -> str:
    """Return the class of a finding for rules; for a rank that died, how it died, if known."""
    from dpro.detect.hang.evidence import RAISED
    from dpro.detect.hang.memory import CAUSE as OUT_OF_MEMORY

    how = {RAISED: EXCEPTION, OUT_OF_MEMORY: MEMORY}
    return how.get(finding.cause, finding.class_) if finding.class_ == "dead.rank" else finding.class_


def class_of_end(analysis: Analysis) -> str:
    """Return how the job of a run ended, as one of `ENDS`; empty if it ended normally, or still runs."""
    from dpro.analysis.end import ENDED, FAILED

    end = analysis.end
    if end.how == ENDED:
        return OUTSIDE
    if end.how != FAILED:
        return ""
    causes = [class_of(finding) for finding in analysis.hangs[:1]]
    if causes and causes[0] in ENDS:
        return causes[0]
    died = [death for death in analysis.waiting.deaths.values() if not death.lost_peer][:1]
    if any(death.raised for death in died):
        return EXCEPTION
    return SIGNAL if any(death.exit_signal > 0 for death in died) else EXIT
