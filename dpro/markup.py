"""Facts as a small table of HTML, which is how notebooks show objects that are no frames.

In: a title and rows of texts. Out: HTML in which names from traces are text and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from dpro.words import printable


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table with a caption.

    Args:
        header: names of the columns; none for names and values.
    """
    head = f"<thead><tr>{_cells('th', header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{_cells('th', row[:1])}{_cells('td', row[1:])}</tr>" for row in rows)
    caption = f"<caption style='text-align: left; caption-side: top'>{_text(title)}</caption>"
    return f"<table style='text-align: left'>{caption}{head}<tbody>{body}</tbody></table>"


def _cells(kind: str, texts: Iterable[str]) -> str:
    return "".join(f"<{kind} style='text-align: left'>{_text(text)}</{kind}>" for text in texts)


def _text(text: str) -> str:
    return escape(printable(text)).replace("\n", "<br>")
