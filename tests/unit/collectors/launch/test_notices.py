"""What a recording says on the job's stderr, and when it releases it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpro.collectors.launch.notices import LastWord


@contextmanager
def piped() -> Iterator[int]:
    """Make stderr a pipe; yield the end to read from."""
    out, into = os.pipe()
    before = os.dup(2)
    os.dup2(into, 2)
    os.close(into)
    try:
        yield out
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(out)


def written(last_word: LastWord, out: int) -> bytes:
    """What was written once no other descriptor has the pipe: blocks if the last word still has it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    return os.read(out, 1 << 16)


def test_a_line_is_written_once_and_the_pipe_closed():
    with piped() as out:
        last_word = LastWord(Path("run"))
        last_word.say("nothing was recorded")
        last_word.say("again")
        assert written(last_word, out) == b"dpro: nothing was recorded\n"
        assert os.read(out, 1) == b""


def test_a_released_pipe_is_closed_and_gets_nothing():
    with piped() as out:
        last_word = LastWord(Path("run"))
        last_word.release()
        last_word.say("nothing was recorded")
        assert written(last_word, out) == b""


def test_a_file_is_kept_since_no_reader_waits_for_it(tmp_path: Path):
    before = os.dup(2)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    last_word = LastWord(Path("run"))
    os.dup2(before, 2)
    last_word.release()
    last_word.say("no step")
    for number in (before, log):
        os.close(number)
    assert (tmp_path / "log").read_bytes() == b"dpro: no step\n"


def test_a_full_pipe_without_a_reader_is_not_waited_for():
    with piped():
        os.set_blocking(2, False)
        with suppress(BlockingIOError):
            while os.write(2, bytes(1 << 12)):
                pass
        os.set_blocking(2, True)
        last_word = LastWord(Path("run"))
        last_word.say("nothing was recorded")
        assert last_word.descriptor == -1


def test_a_quiet_recording_says_nothing():
    with piped() as out:
        last_word = LastWord(Path("run"), quiet=True)
        last_word.say("nothing was recorded")
        assert written(last_word, out) == b""
