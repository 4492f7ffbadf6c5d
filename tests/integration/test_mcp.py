"""`dpro mcp`, asked by the client of the `mcp` package over standard input and output."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

import pytest

from tests.commands import dpro
from tests.jobs import ROOT

pytest.importorskip("mcp")

import anyio
from mcp import Client, StdioServerParameters

TIMEOUT_S = 300  # instead of a test that hangs
HEALTHY, SLOW = "healthy", "slow_rank"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {  # tool -> the same question on the command line, arguments
    "info": ("info RUN", {"run": SLOW}),
    "explain": ("explain RUN", {"run": SLOW}),
    "diagnose": ("diagnose RUN", {"run": SLOW}),
    "replay": ("replay RUN", {"run": SLOW}),
    "report": ("report RUN --top 3", {"run": SLOW, "top": 3}),
    "whatif": ("whatif RUN -e heal:rank=1", {"run": SLOW, "edits": ["heal:rank=1"]}),
    "sensitivity": ("whatif RUN --sensitivity", {"run": SLOW}),
    "diff": ("diff OTHER RUN", {"a": HEALTHY, "b": SLOW}),
}
SELECTED: dict[str, tuple[str, dict[str, Any]]] = {  # tool -> the same of selected steps and ranks
    "report": (
        "report RUN --top 3 --steps 5-6 --ranks 1",
        {"run": SLOW, "top": 3, "steps": "5-6", "ranks": "1"},
    ),
    "replay": ("replay RUN --steps 30-31", {"run": SLOW, "steps": "30-31"}),
    "whatif": (
        "whatif RUN -e heal:rank=1 --steps 5,30-31",
        {"run": SLOW, "edits": ["heal:rank=1"], "steps": "5,30-31"},
    ),
    "diff": (
        "diff OTHER RUN --steps 5-7 --ranks 1",
        {"a": HEALTHY, "b": SLOW, "steps": "5-7", "ranks": "1"},
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for name in (HEALTHY, SLOW):
        shutil.copytree(ROOT / "sample_traces" / name, folder / name)
    (folder / "link").symlink_to(ROOT)
    return folder


@pytest.fixture(scope="module")
def answers(served, tmp_path_factory, make_cache) -> dict[str, Any]:
    """The answers of one session with the server: the tools, and each call by its name."""
    calls = {name: (name, arguments) for name, (_, arguments) in ASKED.items()}
    calls |= {f"selected {name}": (name, arguments) for name, (_, arguments) in SELECTED.items()}
    calls |= {
        "no such steps": ("report", {"run": SLOW, "steps": "900-901"}),
        "no steps": ("whatif", {"run": SLOW, "steps": "x"}),
        "runs": ("runs", {}),
        "edits": ("edits", {}),
        "outside": ("info", {"run": str(ROOT / "sample_traces" / SLOW)}),
        "link": ("info", {"run": "link/sample_traces/slow_rank"}),
        "url": ("info", {"run": "file:///etc"}),
        "no such run": ("info", {"run": "nothing"}),
        "no memory": ("pareto", {"run": SLOW}),
        "no such edit": ("whatif", {"run": SLOW, "edits": ["heel:rank=1"]}),
        "no run": ("info", {}),
        "unknown argument": ("info", {"run": SLOW, "ruin": 1}),
        "no such tool": ("remove", {"run": SLOW}),
    }
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "dpro", "mcp", str(served)],
        # All variables: those of BLAS decide the last digits of fits.
        env=os.environ
        | {"DPRO_CACHE": str(make_cache(tmp_path_factory.mktemp("cache"))), "PYTHONPATH": str(ROOT)},
    )

    async def ask() -> dict[str, Any]:
        found = {}
        with anyio.fail_after(TIMEOUT_S):
            async with Client(server) as client:
                found["tools"] = await client.list_tools()
                for name, (tool, arguments) in calls.items():
                    found[name] = await client.call_tool(tool, arguments)
        return found

    return anyio.run(ask)


def test_tools_have_schemas_with_meanings_and_are_marked_as_reading(answers):
    tools = {tool.name: tool for tool in answers["tools"].tools}
    assert set(ASKED) | {"runs", "edits", "pareto"} == set(tools)
    for tool in tools.values():
        assert tool.description
        assert tool.annotations.read_only_hint is True
        assert tool.input_schema["type"] == tool.output_schema["type"] == "object"
    assert tools["info"].input_schema["required"] == ["run"]
    assert "run directory" in tools["info"].input_schema["properties"]["run"]["description"]
    finding = tools["diagnose"].output_schema["$defs"]["FindingDocument"]["properties"]
    assert "cost_ms_per_step" in finding
    assert finding["class"]["description"].startswith("such as `slow.host`")


@pytest.mark.few(4)
@pytest.mark.parametrize("asked", [*ASKED, *(f"selected {tool}" for tool in SELECTED)])
def test_a_tool_answers_what_the_command_answers(answers, served, asked):
    command, _ = SELECTED[asked.removeprefix("selected ")] if asked.startswith("selected") else ASKED[asked]
    words = command.replace("RUN", str(served / SLOW)).replace("OTHER", str(served / HEALTHY)).split()
    printed = json.loads(dpro(*words, "--json").stdout)
    answer = answers[asked]
    assert not answer.is_error
    assert answer.structured_content == printed
    assert json.loads(answer.content[0].text) == printed


def test_runs_and_edits_are_listed(answers, served):
    assert answers["runs"].structured_content["runs"] == [str(served / HEALTHY), str(served / SLOW)]
    examples = [each["example"] for each in answers["edits"].structured_content["edits"]]
    assert any(example.startswith("heal:") for example in examples)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("outside", "leads out of"),
        ("link", "leads out of"),
        ("url", "is a URL"),
        ("no such run", "no such file or folder"),
        ("no memory", "--memory"),
        ("no such steps", "selects nothing; steps recorded in depth: 5-7"),
        ("no steps", "steps 'x' are invalid"),
        ("no such edit", "did you mean 'heal'?"),
        ("no run", "missing required field `run`"),
        ("unknown argument", "unknown field `ruin`"),
        ("no such tool", "there are runs, info"),
    ],
)
def test_what_cannot_be_answered_is_an_error_of_the_tool_in_one_line(answers, call, said):
    answer = answers[call]
    assert answer.is_error
    (content,) = answer.content
    assert said in content.text
    assert "\n" not in content.text


def test_nothing_is_written_below_the_served_folders(answers, served):
    for name in (HEALTHY, SLOW):
        here, there = served / name, ROOT / "sample_traces" / name
        assert sorted(path.relative_to(here) for path in here.rglob("*")) == sorted(
            path.relative_to(there) for path in there.rglob("*")
        )
