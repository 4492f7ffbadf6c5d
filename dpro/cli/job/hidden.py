"""Words of the command line that the list of processes must not show, such as the address of a webhook.

In: a word of this process's own command line. Out: the same word overwritten, in the memory that the kernel
shows to every user of the machine; processes that are forked from here inherit that. What was parsed stays.
"""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")
_ARG_START, _ARG_END = 45, 46  # of `stat`, counted after the process's name: fields 48 and 49 of proc(5)


def hide(word: str) -> bool:
    """Overwrite a word of this process's command line wherever it is.

    Returns:
        Whether the list of processes does not show it.
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
    except OSError:  # no such list here
        return b""
