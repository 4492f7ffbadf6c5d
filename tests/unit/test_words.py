"""The field's words: a short list of words that neither names nor prose may use, and what to write."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = {
    "told": "inferred, distinguished, reported, named",
    "tell": "say, show, infer, distinguish",
    "tells": "says, shows, implies",
    "telling": "showing, inferring",
    "alike": "equal, the same, both",
    "nobody": "no rank, no reader, no process: name it",
    "somebody": "a user, a rank: name it",
    "whom": "which rank, which module: name it",
    "hurt": "slow, delay",
    "rhythm": "synchronisation schedule",
    "riddle": "say it plainly",
    "anew": "again",
    "thereby": "so",
}
PHRASES = {
    "handed out": "distributed, rebalanced",
    "lets go of": "releases",
    "sorts of": "kinds of",
    "longer way": "added network latency",
    "in a circle": "deadlock, cyclic wait",
    "of what nature": "of which kind",
    "for want of": "for lack of",
    "in vain": "without effect",
    "be it ": "whether it is",
    "so many ": "this many, this number of, once per",
}
CONSTANTS = re.compile(r"\b_?(LEAST|MOST|FEWEST)(_[A-Z]|\b(?! ))")  # MIN_ and MAX_
READ = {".py", ".md", ".toml", ".sh", ".js", ".html", ".css", ".yml", ".yaml", ""}
EXEMPT = {"test_words.py", "LICENSE"}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def banned_in(text: str) -> list[str]:
    """Return the banned words in a text as `line: word`; names are split at their parts."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = {word.lower() for word in _WORD.findall(line.replace(".tell()", ""))}  # of files
        found += [f"{number}: {word} ({BANNED[word]})" for word in sorted(words & BANNED.keys())]
        found += [f"{number}: {phrase} ({PHRASES[phrase]})" for phrase in PHRASES if phrase in line.lower()]
        found += [f"{number}: {match[0]} (MIN_, MAX_)" for match in CONSTANTS.finditer(line)]
    return found


def files() -> list[Path]:
    """Return the files of the project that are read, relative to its root."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [path for path in map(Path, listed.stdout.splitlines()) if path.suffix in READ]


def test_names_and_prose_use_the_fields_words() -> None:
    found = [
        f"{path}:{where}"
        for path in files()
        if path.name not in EXEMPT
        if (ROOT / path).is_file() and not (ROOT / path).is_symlink()
        for where in banned_in((ROOT / path).read_text(encoding="utf-8", errors="replace"))
    ]
    assert not found, "\n".join(found)


def test_a_banned_word_is_found_in_names_of_both_styles_and_in_prose() -> None:
    found = ["def is_told(x): ...", "class ToldOnce: ...", "# nobody waits", "LEAST_SHARE = 1"]
    clean = ["at LEAST one", "a stole untold", "file.tell()"]
    assert [line.split(":")[0] for line in banned_in("\n".join(found + clean))] == ["1", "2", "3", "4"]
