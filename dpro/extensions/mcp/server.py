"""The MCP server: tools over standard input and output, with the `mcp` package.

Takes the folders that may be read; serves until its client is gone. Errors that a user can act on are errors
of the tool, in one line. One call runs at a time, in a process that keeps its analyses for the next call, and
is killed if a call takes too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_process
from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

from dpro._version import __version__
from dpro.documents import Document, encode, plain, schema_of
from dpro.errors import DproError, InternalError, first_line
from dpro.extensions.mcp.tools import TOOLS, call
from dpro.panics import is_panic
from dpro.words import one_line

INSTRUCTIONS = (
    "dpro explains recorded runs of distributed training: begin with `runs` and `explain`. "
    "Believe predictions as far as `trust` says, and name the run's `reasons` beside them."
)


def serve(folders: Sequence[Path], limit_s: float) -> None:
    """Serve on standard input and output until the client is gone."""
    anyio.run(_serve, make_server(folders, limit_s))


async def _serve(server: Server[Any]) -> None:
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def make_server(folders: Sequence[Path], limit_s: float) -> Server[Any]:
    """Return a server of the tools, which ends a call after `limit_s` seconds."""
    one_at_a_time = anyio.Lock()

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=_declared())

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        asked = params.name, params.arguments or {}, folders
        async with one_at_a_time:
            with anyio.move_on_after(limit_s):
                return await anyio.to_process.run_sync(_result, *asked, cancellable=True)
        return _refused(f"{params.name}: took longer than {limit_s:g} s; `dpro mcp --timeout` allows more")

    return Server(
        "dpro",
        version=__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _declared() -> list[types.Tool]:
    read_only = types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    return [
        types.Tool(
            name=name,
            description=tool.meaning,
            input_schema=schema_of(tool.takes),
            output_schema=schema_of(tool.gives),
            annotations=read_only,
        )
        for name, tool in TOOLS.items()
    ]


def _result(name: str, arguments: dict[str, Any], folders: Sequence[Path]) -> types.CallToolResult:
    """Answer a call; return errors that a user can act on, and defects of dpro, as one line."""
    try:
        return _answered(call(name, arguments, folders))
    except (DproError, InternalError) as error:
        return _refused(str(error))
    except BaseException as error:
        if not is_panic(error):
            raise
        return _refused(str(InternalError(first_line(error))))


def _answered(document: Document) -> types.CallToolResult:
    text = types.TextContent(text=encode(document))  # for clients that do not read structured content
    return types.CallToolResult(content=[text], structured_content=plain(document))


def _refused(line: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=one_line(line))], is_error=True)
