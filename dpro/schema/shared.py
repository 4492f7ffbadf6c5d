"""Columns that tables share."""

from __future__ import annotations

import polars as pl

from dpro.members import is_members_text
from dpro.schema.members import texts_of_lists
from dpro.table import Column

RANK = Column(pl.Int32, "Global rank of the process, -1 where a row belongs to no rank.")
WINDOW = Column(pl.Int32, "Which deep window of the recording; spans of different windows never touch.", 0)
START = Column(pl.Int64, "Start, ns on the recording host's clock.")
DURATION = Column(pl.Int64, "Duration in ns; -1 where the source does not know it.")
GROUP_RANKS = Column(
    pl.String,
    "Global ranks of the group, as `0-7`, `0-56:8` or `0,3`; empty where unknown.",
    "",
    texts_of_lists,
    is_members_text,
)
