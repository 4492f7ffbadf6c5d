"""The server in two pools of the benchmark: its messages, and its two rows of each request."""

from __future__ import annotations

import socket
from pathlib import Path

import polars as pl
import pytest

from benchmarks.serving_checks.pairs import served_in
from benchmarks.serving_server.link import read, write
from dpro.schema import REQUESTS, conform
from dpro.store import Manifest, write_manifest, write_part
from dpro.table import complete

COLUMNS = [
    "name", "arrival_ns", "scheduled_ns", "first_token_ns", "end_ns",
    "prompt_tokens", "cached_tokens", "output_tokens",
]  # fmt: skip


def test_message_is_read_as_it_was_written() -> None:
    here, there = socket.socketpair()
    with here, there:
        write(here, {"what": "r1", "tokens": [3, 4]}, b"keys and values")
        write(here, {"what": "end"}, b"")
        assert read(there) == ({"what": "r1", "tokens": [3, 4]}, b"keys and values")
        assert read(there) == ({"what": "end"}, b"")
        here.close()
        with pytest.raises(ConnectionError):
            read(there)


def test_request_of_two_pools_lasts_from_its_prompt_to_its_last_token(tmp_path: Path) -> None:
    rows = pl.DataFrame(
        [
            ("warm-before-0", 1, 2, 3, 9, 48, 0, 25),
            ("r0", 10, 11, 20, 20, 100, 0, 1),  # the prompt, with the first token
            ("r0", 22, 23, 30, 90, 101, 100, 7),  # the others
        ],
        schema=COLUMNS,
        orient="row",
    ).with_row_index("request")
    rows = rows.with_columns(pl.col("request").cast(pl.Int64), outcome=pl.lit("finished"))
    write_part(tmp_path, REQUESTS, "hook", conform(REQUESTS, complete(REQUESTS, rows)))
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[]))
    (request,) = served_in(tmp_path)[0].to_dicts()
    moments = ("arrival_ns", "scheduled_ns", "first_token_ns", "end_ns")
    assert [request[name] for name in moments] == [10, 11, 20, 90]
    assert (request["prompt_tokens"], request["output_tokens"]) == (100, 8)
