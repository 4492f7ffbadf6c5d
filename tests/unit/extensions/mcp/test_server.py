"""Calls of the server that take too long."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp")

import anyio
from mcp import Client

from dpro.extensions.mcp import server


def _slowly(name: str, arguments: dict[str, Any], folders: tuple[Path, ...]) -> Any:
    time.sleep(600 if name == "diagnose" else 0)
    return server._result("runs", arguments, folders)


@pytest.mark.slow
def test_a_call_that_takes_too_long_is_ended_and_keeps_no_other_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_result", _slowly)

    async def ask() -> list[Any]:
        async with Client(server.make_server([tmp_path], 10.0)) as client:
            return [await client.call_tool(name, {}) for name in ("diagnose", "runs")]

    late, soon = anyio.run(ask)
    assert late.is_error
    assert late.content[0].text == "diagnose: took longer than 10 s; `dpro mcp --timeout` allows more"
    assert soon.structured_content["runs"] == []
