"""Text for people: control characters escaped, long names and lists shortened, numbers in words."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise, takewhile
from typing import Any

_MORE = "…"
_MISSING_NAMED = 8  # ranks
MAX_DIGITS = 18
# C0 without tab and newline, delete, C1; bidirectional marks, embeddings, overrides and isolates; line and
# paragraph separators; lone surrogates, as in undecodable file names; tag characters, which are invisible.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]"
)
_BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)(?: of (?:type )?([\w.]+) object at 0x\w*)?>?")
_IN_CPP = re.compile(r"^void |^nccl\w+\(|\w::.*[<(]|\(anonymous namespace\)")
_UNNAMED = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_QUALIFIED = re.compile(r"\b(?:\w+::)+(?=\w)")
_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPED_BYTES = re.compile(_ESCAPED.pattern.encode())


def printable(text: str) -> str:
    """Escape the characters that control a terminal or the direction of text: `\\x1b`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def is_utf8(text: str) -> bool:
    """Return whether a name can be encoded as UTF-8; a file name may contain other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def from_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, with lone surrogates escaped, since no table or file can store them.

    Args:
        text: JSON written by a job, whose exceptions, names and paths may contain lone surrogates.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: the value is nested too deeply.
    """
    value = json.loads(text)
    escaped = _ESCAPED_BYTES.search(text) if isinstance(text, bytes) else _ESCAPED.search(text)
    return _spelt_out(value) if escaped else value


def _spelt_out(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_spelt_out(name): _spelt_out(inner) for name, inner in value.items()}
    return [_spelt_out(inner) for inner in value] if isinstance(value, list) else value


def one_line(text: str) -> str:
    """Return a text as `printable`, on one line."""
    return " ".join(filter(None, map(str.strip, printable(text).split("\n"))))


def shortened(text: str, most: int) -> str:
    """Cut a text to at most `most` characters, with a mark at the cut: `ncclDevKernel_AllRed…`.

    Args:
        most: number of characters, at least 1.
    """
    return text if len(text) <= most else text[: most - 1] + _MORE


def distinct_names(names: Sequence[str], most: int) -> list[str]:
    """Cut names to at most `most` characters so that they stay distinct: `Cijk_Alik_Blj…_MT128x256…`.

    Where no part of that length distinguishes names, they are numbered: `elementwise #2…direct_copy…`.

    Args:
        most: number of characters, at least 8.
    """
    with_same_start: dict[str, set[str]] = {}
    for name in names:
        with_same_start.setdefault(name[: most - 1], set()).add(name)
    by_name: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name in dict.fromkeys(names):
        cut = name
        if len(name) > most:
            cut = _without_middle(name, with_same_start[name[: most - 1]] - {name}, most)
        times[cut] += 1
        head, mark, end = cut.partition(_MORE)
        number = f" #{times[cut]}" if times[cut] > 1 else ""
        by_name[name] = head[: len(head) - len(number)] + number + mark + end
    return [by_name[name] for name in names]


def _without_middle(name: str, others: Iterable[str], most: int) -> str:
    """Cut the middle of a name, up to where it differs from the others; without others, cut its end."""
    equal = [takewhile(lambda pair: pair[0] == pair[1], zip(name, other)) for other in others]
    shared = max((len(list(pairs)) for pairs in equal), default=0)
    if not shared:
        return shortened(name, most)
    begin = shared
    while shared - begin < most // 4 and name[begin - 1].isalnum():
        begin -= 1  # keep words and numbers whole
    end = shortened(name[begin:], most // 2)
    return name[: most - len(end) - 1] + _MORE + end


def capitalised(text: str) -> str:
    """Capitalise the first letter and leave the rest unchanged."""
    return text[:1].upper() + text[1:]


def counted(number: int, what: str, several: str = "") -> str:
    """Return `1 step`, `2,000 steps`; `several` is the plural where appending an s is wrong."""
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def short_name(name: str) -> str:
    """Return a readable name: C++ without namespaces and arguments, built-ins without addresses.

    `void at::native::(anonymous namespace)::softmax<at::Half, 4>(int*)` is `softmax<Half, 4>`.
    """
    method = _BUILT_IN.match(name)
    if method:
        return f"{method[2]}.{method[1]}" if method[2] else method[1]
    if not _IN_CPP.search(name):
        return name
    plain = _QUALIFIED.sub("", _UNNAMED.sub("", name).replace("void ", "").strip())
    depth = 0
    for place, sign in enumerate(plain):
        depth += {"<": 1, ">": -1}.get(sign, 0)
        if sign == "(" and depth <= 0 and place:
            return plain[:place]
    return plain


def whole_number(text: str) -> int:
    """Return the number that a text of digits denotes; -1 for other texts, or more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else -1


def first_few(items: Sequence[object], most: int) -> str:
    """Return the first `most` items of a list, with a mark if there are more: `0, 3, 5 …`."""
    return ", ".join(map(str, items[:most])) + (f" {_MORE}" if len(items) > most else "")


def missing_in_words(missing: Sequence[int], world_size: int) -> str:
    """Return `2 of 8 ranks are missing: 3, 5`, for a warning."""
    return f"{share_missing(len(missing), world_size)}: {first_few(missing, _MISSING_NAMED)}"


def share_missing(num_missing: int, world_size: int) -> str:
    """Return `2 of 8 ranks are missing`."""
    return f"{num_missing} of {world_size} ranks {'is' if num_missing == 1 else 'are'} missing"


def ordinal(number: int) -> str:
    """Return `1st`, `2nd`, `40th`."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0-2, 5`."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) != 1 else ''} {numbers_in_words(numbers)}"


def as_fast_as_peers(ranks: Sequence[int]) -> str:
    """Return `rank 1 as fast as its peers`, or `ranks 0-2 as fast as their peers`."""
    return f"{ranks_in_words(ranks)} as fast as {'its' if len(ranks) == 1 else 'their'} peers"


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Return ascending numbers with consecutive ones joined: `0-2, 5`."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)] if numbers else []
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]] if numbers else []
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def one_of_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `one of ranks 0-2, 5`."""
    numbers = sorted(ranks)
    return ranks_in_words(numbers) if len(numbers) == 1 else f"one of {ranks_in_words(numbers)}"


def nearest_of(word: str, names: Iterable[str]) -> str:
    """Return the name that a word may be a slip of: of similar ones, that of fewest edits; "" without."""
    from difflib import SequenceMatcher, get_close_matches  # for mistakes only

    there = list(names)
    pairs = [name for name in there if len(name) == len(word) == 2]  # one letter is half of such a word
    close = get_close_matches(word, there, n=5) or get_close_matches(word, pairs, n=1, cutoff=0.5)

    def count_edits(name: str) -> int:
        parts = SequenceMatcher(None, word, name).get_opcodes()
        return sum(max(i_end - i, j_end - j) for tag, i, i_end, j, j_end in parts if tag != "equal")

    return min(close, key=count_edits, default="")


def suggest(word: str, names: Iterable[str]) -> str:
    """Return ` (did you mean …?)` with the name nearest to a word; empty where none is near."""
    meant = nearest_of(word, names)
    return f" (did you mean {meant!r}?)" if meant else ""
