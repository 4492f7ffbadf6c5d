"""What controls a terminal is spelt out wherever a name, a path or a message gets there; JSON stays exact."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import resource
import shutil
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from contextvars import copy_context
from itertools import groupby
from pathlib import Path
from threading import Thread
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.progress import Progress as Bar
from rich.progress import TaskID

from dpro.cli import cli
from dpro.cli.analysis import progress_bar
from dpro.cli.output import (
    console,
    escape_output,
    print_json,
    progress,
    stderr_console,
    warn,
    wrapped,
    write_text,
)
from dpro.documents import DocumentPart
from dpro.errors import UsageError
from dpro.stages import set_display, stage
from dpro.words import one_line, printable
from tests.commands import dpro, on_terminal
from tests.jobs import ROOT
from tests.traces import write_rank

update = Bar.update
TITLE, CLIPBOARD, COLOUR = "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJmIH4=\x1b\\", "\x1b[31m"
C1, OVERRIDE, HALF = "\x9b31m\x9d0;title\x9c", "\u202eexe.gpj\u2066", "\udcff"
EVIL = f"a{TITLE}{CLIPBOARD}{COLOUR}{C1}\r\b\x00\x7f{OVERRIDE}{HALF}z"

DIRECTIONS = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


class Named(DocumentPart, frozen=True):
    """A document of one key."""

    name: str


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said_by(speak: Callable[[], object], monkeypatch) -> list[str]:
    """What a process that speaks plainly says on its two streams, which are terminals."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    streams = Terminal(), Terminal()
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        escape_output()
        speak()
    return [stream.getvalue() for stream in streams]


def harmful(text: str) -> set[str]:
    """Characters of a text that control something; newlines and tabs do no harm."""
    controls = {c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")} - set("\n\t")
    return controls | {c for c in text if unicodedata.bidirectional(c) in DIRECTIONS}


@given(st.text(st.characters(), max_size=50))
def test_nothing_that_controls_a_terminal_is_left_and_all_else_is_as_it_was(text):
    shown = printable(text)
    assert harmful(shown) == set()
    assert "\n" not in one_line(text)
    assert printable(shown) == shown
    if not harmful(text):
        assert all(kept in shown for kept in text if unicodedata.category(kept) != "Cf")


def test_names_of_people_and_kernels_stay():
    for text in ("é 中文 עברית 😀 ‘x’ → µs", "void gemm<float, 4>(T*)\tx\n"):
        assert printable(text) == text


@pytest.mark.parametrize(
    "speak",
    [
        lambda: click.echo(EVIL),
        lambda: click.echo(EVIL, err=True),
        lambda: print(EVIL),
        lambda: click.echo(EVIL.encode(errors="surrogateescape")),
        lambda: sys.stderr.writelines([EVIL, EVIL]),
        lambda: warn(EVIL),
        lambda: console().print(EVIL),
        lambda: click.UsageError(EVIL).show(),
        lambda: sys.excepthook(ValueError, ValueError(EVIL), None),
    ],
)
def test_no_way_to_speak_lets_it_through(monkeypatch, speak):
    said = "".join(said_by(speak, monkeypatch))
    assert harmful(said) == set()
    assert r"\x1b]52;c;" in said
    assert r"\u202e" in said


def test_tables_and_progress_keep_their_own_colours_and_movements_and_nothing_of_names(monkeypatch):
    def speak() -> None:
        from rich.table import Table

        table = Table("name", title=EVIL)
        table.add_row(EVIL, style="red")
        console().print(table)
        with progress(EVIL) as report:
            report(1, 2)
        with stderr_console().status(EVIL):
            warn(EVIL)

    for said in said_by(speak, monkeypatch):
        assert "\x1b[" in said
        assert "\x1b]" not in said
        assert COLOUR + "\\x9b" not in said
        assert harmful(said) - set("\x1b\r") == set()


def updated_at_once(bar: Bar, task: TaskID, **to: Any) -> None:
    """Show each change: else a thread shows what there is ten times a second."""
    update(bar, task, **to)
    bar.refresh()


def shown_in_turn(said: str) -> list[str]:
    """What stood on the line of the bar, one after the other, without the bar and the time left."""
    lines = re.split(r"[\r\n]|\x1b\[\d?[AK]", re.sub(r"\x1b\[[\d;?]*[mlh]", "", said))
    texts = (re.sub(r"[━╸╺]+|-:--:--|\d:\d\d:\d\d", "", line) for line in lines)
    return [text for text, _ in groupby(" ".join(text.split()) for text in texts if text.split())]


def test_a_stage_inside_another_stands_in_its_place_and_says_how_far_it_is(monkeypatch):
    def speak() -> None:
        set_display(progress)
        with stage("outer") as outer:
            outer(1, 2)
            with stage("inner") as inner:
                inner(2, 2)
        with progress_bar() as reading:
            reading(0, 2000)
            reading(2000, 2000)
            with stage("writing"):
                pass

    monkeypatch.setattr("rich.progress.Progress.update", updated_at_once)
    shown = shown_in_turn(copy_context().run(said_by, speak, monkeypatch)[1])
    assert shown == [
        *["outer", "outer 50%", "inner", "inner 100%", "outer 50%"],
        *["Looking for traces", "Reading traces 0.0/2.0 kB", "Reading traces 2.0/2.0 kB"],
        *["writing", "Reading traces 2.0/2.0 kB", "Looking for traces"],
    ]


def test_reading_is_named_as_soon_as_it_begins(monkeypatch):
    def speak() -> None:
        set_display(progress)
        with progress_bar() as reading:
            reading(0, 2000)
            reading(2000, 2000)

    monkeypatch.setattr("rich.live._RefreshThread.run", lambda _thread: None)
    shown = shown_in_turn(copy_context().run(said_by, speak, monkeypatch)[1])
    assert shown[:2] == ["Looking for traces", "Reading traces 0.0/2.0 kB"]


def test_stages_of_threads_are_not_shown_and_none_where_stderr_is_no_terminal(monkeypatch, capsys):
    def speak() -> None:
        set_display(progress)
        thread = Thread(target=stage("of a thread").__enter__)
        thread.start()
        thread.join()

    assert copy_context().run(said_by, speak, monkeypatch) == ["", ""]
    with stage("not shown") as report:
        report(1, 2)
    with progress("not shown") as report:
        report(1, 2)
    assert capsys.readouterr().err == ""


def test_a_command_names_what_it_does_and_the_bar_ends_with_the_graph(tmp_path):
    write_rank(tmp_path / "in", 0, world_size=1)
    shown = shown_in_turn(on_terminal(tmp_path / "in").decode())
    text = " | ".join(shown)
    assert "?" not in text.split("in   1 rank")[0]
    stages = ["Reading traces", "Building the graph", "Joining the ranks", "Replaying the graph"]
    places = [text.index(name) for name in [*stages, "Looking for faults", "Trying changes"]]
    assert places == sorted(places)


def test_the_reset_of_colours_that_colorama_writes_at_the_end_is_not_spelt_out(monkeypatch):
    assert said_by(lambda: print("\x1b[0m", end=""), monkeypatch)[0] == "\x1b[0m"


def test_json_is_exact_and_ascii(monkeypatch):
    said, _ = said_by(lambda: print_json(Named(EVIL)), monkeypatch)
    assert said.isascii()
    assert harmful(said) == set()
    assert json.loads(said)["name"] == EVIL


def test_a_message_is_one_line_whatever_is_in_it(monkeypatch):
    _, said = said_by(lambda: warn("first\n\ndpro: warning: second"), monkeypatch)
    assert said == "dpro: warning: first dpro: warning: second\n"


@pytest.mark.parametrize(
    ("arguments", "encoding"),
    [(["info", f"no\x1b]0;owned\x07{OVERRIDE}{HALF}"], "utf-8"), (["inf\x9b\u202e"], "ascii")],
)
def test_a_path_that_does_not_exist_and_a_word_that_is_no_command_are_said_plainly(arguments, encoding):
    done = subprocess.run(
        [sys.executable, "-m", "dpro", *arguments],
        env={"PYTHONIOENCODING": encoding, "PYTHONUTF8": "1"},
        capture_output=True,
    )
    assert done.returncode in (1, 2)
    said = (done.stdout + done.stderr).decode(encoding)
    assert harmful(said) == set()
    assert r"\u202e" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("old", ["", "of yesterday"])
def test_a_file_that_there_is_no_room_for_is_not_left_in_part(old, tmp_path):
    path = tmp_path / "report.html"
    if old:
        path.write_text(old)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UsageError, match=r"report\.html: cannot be written \(File too large\)"):
            write_text(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.read_text() for each in tmp_path.iterdir()] == ([old] if old else [])


def test_a_report_may_go_to_what_is_no_file(tmp_path):
    write_text(Path("/dev/null"), "text")
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "target").read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_that_no_process_reads_is_not_written(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe: cannot be written"):
        write_text(tmp_path / "pipe", "text")


def test_a_pipe_is_written_for_the_process_that_reads_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        held = os.open(tmp_path / "pipe", os.O_WRONLY)  # once the reader is there
        write_text(tmp_path / "pipe", "text")
        os.close(held)
        assert reader.communicate()[0] == b"text"


def test_a_link_to_itself_is_replaced(tmp_path):
    (tmp_path / "link").symlink_to("link")
    assert write_text(tmp_path / "link", "text").read_text() == "text"


def test_long_lines_wrap_at_words_with_numbers_beside_their_units():
    line = "  - on stage 3 every forward takes 140 ms, on the others 67.5 ms of 2.5 GB/s"
    assert wrapped(line, 62).splitlines() == [
        "  - on stage 3 every forward takes 140 ms, on the others",
        "    67.5 ms of 2.5 GB/s",
    ]
    assert wrapped(line, 200) == line
    assert wrapped("", 80) == ""


def test_what_a_user_copies_and_words_that_are_too_long_stay_whole():
    edit = f"         --edit 'scale:name={'x' * 90},factor=2'  (new code)"
    assert wrapped(edit, 80) == edit
    name = "void_" + "y" * 100
    assert wrapped(f"  {name} takes long", 80).splitlines()[0].strip() == name


def test_what_follows_a_label_wraps_below_its_value():
    lines = wrapped("step time  typical step 72.2 ms (111 steps outside deep windows)", 48).splitlines()
    assert lines == ["step time  typical step 72.2 ms (111 steps", "           outside deep windows)"]


@pytest.mark.slow
def test_lines_wrap_on_a_terminal_alone(tmp_path):
    read_end, write_end = pty.openpty()
    command = [sys.executable, "-m", "dpro", "diagnose", str(ROOT / "sample_traces" / "slow_rank")]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fcntl.ioctl(write_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 72, 0, 0))
    plain = os.environ | {"TERM": "xterm", "COLUMNS": "72"}
    with subprocess.Popen(command, stdout=write_end, stderr=subprocess.DEVNULL, env=plain) as shown:
        os.close(write_end)
        text = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(read_end, 1 << 16):
                text += part
    assert shown.returncode == 0
    lines = click.unstyle(text.decode()).splitlines()
    assert all(len(line) <= 72 or max(map(len, line.split())) > 40 for line in lines)  # a long name
    assert max(map(len, piped.splitlines())) > 100
    assert " ".join(" ".join(lines).split()) == " ".join(piped.split())


def shown_on_a_terminal(rows: int, *arguments: str, keys: bytes = b"", **environment: str) -> list[str]:
    """What a command shows on a terminal of some rows, whose pager puts `:` before each line."""
    variables = {"PAGER": "sed s/^/:/", "LINES": str(rows), **environment}
    return on_terminal(*arguments, rows=rows, keys=keys, environment=variables).decode().splitlines()


def test_what_is_longer_than_the_terminal_goes_through_the_pager():
    plain = shown_on_a_terminal(200, "recipe", "slurm")
    assert len(plain) > 5
    assert not any(line.startswith(":") for line in plain)
    assert shown_on_a_terminal(5, "recipe", "slurm") == [f":{line}" for line in plain]


@pytest.mark.few(1)
@pytest.mark.skipif(shutil.which("less") is None, reason="there is no less")
@pytest.mark.parametrize("options", ["", "-S", "-RS"])
def test_less_never_shows_codes_of_bold_text(options):
    run = str(ROOT / "sample_traces" / "slow_rank")
    given = {"LESS": options} if options else {}
    read = {"PAGER": "timeout --foreground 60 less", "LESSSECURE": "1", **given}
    text = "\n".join(shown_on_a_terminal(12, "report", run, keys=b" " * 40 + b"q", **read))
    assert "ESC[" not in click.unstyle(text)  # which less writes in reverse
    assert text


def test_json_never_goes_through_a_pager():
    (line,) = shown_on_a_terminal(1, "ledger", "--json")
    assert json.loads(line)["schema_version"]


@pytest.mark.parametrize("name", ["", *cli.list_commands(click.Context(cli))])
def test_help_fits_a_terminal_of_80_columns(name):
    command = cli.get_command(click.Context(cli), name) if name else cli
    with click.Context(command, info_name=f"dpro {name}", terminal_width=80) as context:
        lines = command.get_help(context).splitlines()
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("asked", [["--help"], ["help"], ["record", "-h"]])
def test_help_that_is_longer_than_the_terminal_is_paged_from_its_beginning(asked):
    [first, *_, prompt] = on_terminal(*asked, keys=b"q").split(b"\r\n")
    assert b"Usage: dpro" in first
    assert b":" in prompt  # of the pager, which waits


def test_no_command_at_all_is_answered_by_the_help_on_stdout_as_a_pipe_needs_it():
    done = dpro()
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith("Usage: dpro")
    assert dpro("--help").stdout == done.stdout
