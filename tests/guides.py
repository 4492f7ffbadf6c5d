"""The commands of the guides and what they print: `python -m tests.guides` writes it into the guides again.

In a guide, `<!-- RUN is slow_rank -->` says what a name stands for: a run that ships, or something made here.
A line of a `console` block that begins with `$` is a command; the lines below it are all that it prints.
`| head -3` and `> /dev/null` mean what they mean to a shell.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

from dpro.cli import cli
from dpro.errors import DproError
from tests.jobs import ROOT, environment
from tests.reference.hanging_dumps import dumps_of_a_stuck_host

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
WITH_A_JOB = ("record", "attach", "try")  # commands that run one, or look into one that runs
ENDS_WITH_1 = "--fail-on"  # that is what it is for
_BLOCK = r"(?ms)^```console\n(.*?)^```$"
_LINE = r"(?m)^\$ (.*)$"
_PIPE = re.compile(r"(?P<command>.*?)(?: \| head -(?P<first>\d+)| (?P<quiet>> /dev/null))?")


class Command(NamedTuple):
    """One command of a guide, and what it prints there."""

    guide: Path
    text: str
    said: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Without `dpro`, and without what comes after it."""
        dpro, *words = shlex.split(_parts(self.text)["command"] or "")
        assert dpro == "dpro"
        return words

    @property
    def runs_a_job(self) -> bool:
        """Whether what it prints depends on a job that runs meanwhile, or ran just now."""
        return self.words[0] in WITH_A_JOB or "NOW" in self.words


def commands() -> Iterator[Command]:
    """Yield all commands of all guides, in order."""
    for guide in GUIDES:
        for block in re.findall(_BLOCK, guide.read_text()):
            first, *rest = re.split(_LINE, block)
            assert not first.strip(), f"{guide.name}: a console block begins with a command"
            for text, said in zip(rest[::2], rest[1::2]):
                yield Command(guide, text, lines_of(said))


def lines_of(text: str) -> tuple[str, ...]:
    """Return the lines of an output without blanks at their ends and without blank lines around."""
    return tuple(
        line.rstrip() for line in "\n".join(map(str.rstrip, text.splitlines())).strip("\n").split("\n")
    )


def make_places(guide: Path, folder: Path) -> None:
    """Make the runs and files that a guide names.

    Args:
        guide: whose.
        folder: where.
    """
    for comment in re.findall(r"<!-- (.*?) -->", guide.read_text()):
        for name, what in re.findall(r"(\w+) is (\w+)", comment):
            if what == "dumps":
                dumps_of_a_stuck_host(folder / name)
            elif what != "hanging":
                (folder / name).symlink_to(ROOT / "sample_traces" / what)


def printed(command: Command) -> tuple[str, ...]:
    """Run a command in the current folder, and return the lines that it prints."""
    if command.words[0] == "dashboard":
        return lines_of(_first_line(command.words))
    done = CliRunner().invoke(cli, command.words)
    assert not isinstance(done.exception, DproError), done.exception
    assert done.exit_code == (1 if ENDS_WITH_1 in command.words else 0), done.output
    parts = _parts(command.text)
    if parts["quiet"]:
        return lines_of(done.stderr)
    if parts["first"]:
        return lines_of("\n".join(done.stdout.splitlines()[: int(parts["first"])]))
    return lines_of(done.output)


def _parts(text: str) -> dict[str, str | None]:
    matched = _PIPE.fullmatch(text)
    assert matched is not None
    return matched.groupdict()


def _first_line(words: list[str]) -> str:
    """What a command that serves pages says before it is interrupted."""
    command = [sys.executable, "-m", "dpro", *words, "--no-browser"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        keeping = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with keeping.open(line.split()[0]) as answer:  # it listens, and takes the token for a cookie
            assert "token" not in answer.url
        try:
            assert _interrupted(process) == 0
        finally:
            process.kill()  # else leaving the block would wait for it for ever
    return line


def _interrupted(process: subprocess.Popen[str]) -> int:
    """Press Ctrl-C, and again where Python lost it in a callback of a library, as people do."""
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(20)
    return process.wait(1)


def main() -> None:
    """Write into the guides what their commands print now, but for those that need a job."""
    for guide in GUIDES:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            make_places(guide, Path(folder))
            guide.write_text(_renewed(guide))


def _renewed(guide: Path) -> str:
    """Return the text of a guide with what its commands print now."""
    of_guide = iter([each for each in commands() if each.guide == guide])

    def block_of(found: re.Match[str]) -> str:
        lines = []
        for _ in re.findall(_LINE, found[1]):
            command = next(of_guide)
            said = command.said if command.runs_a_job else printed(command)
            lines += [f"$ {command.text}", *(said if any(said) else ())]
        return "\n".join(["```console", *lines, "```"])

    return re.sub(_BLOCK, block_of, guide.read_text())


if __name__ == "__main__":
    main()
