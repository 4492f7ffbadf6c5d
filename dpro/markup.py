"""Small HTML tables, for notebooks to show objects that are not data frames.

Takes a title and rows of texts; returns HTML. Names from traces are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from dpro.words import printable


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return an HTML table with a caption; the first cell of each row is a heading.

    Args:
        header: names of the columns; empty for a table without a header.
    """
    head = f"<thead><tr>{_cells('th', header)}</tr></thead>" if header else ""
    body = "".join(f"<tr>{_cells('th', row[:1])}{_cells('td', row[1:])}</tr>" for row in rows)
    caption = f"<caption style='text-align: left; caption-side: top'>{_text(title)}</caption>"
    return f"<table style='text-align: left'>{caption}{head}<tbody>{body}</tbody></table>"


def _cells(kind: str, texts: Iterable[str]) -> str:
    return "".join(f"<{kind} style='text-align: left'>{_text(text)}</{kind}>" for text in texts)


def _text(text: str) -> str:
    return escape(printable(text)).replace("\n", "<br>")
