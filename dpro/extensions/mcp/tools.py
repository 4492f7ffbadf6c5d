"""The tools of the MCP server, with typed arguments, and the documents of `--json` as answers.

Takes a tool's name and its arguments; returns a document. Writes only to the user's cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.diagnosis import (
    DiagnosisDocument,
    diagnose_dumps,
    diagnose_replay,
    diagnose_tables,
    diagnosis_document,
)
from dpro.analysis.answers.info import InfoDocument, info_document
from dpro.analysis.answers.replay import ReplayDocument, chosen_steps, replay_document
from dpro.analysis.answers.report import ReportDocument, report_document, report_tables
from dpro.analysis.answers.whatif import (
    ParetoDocument,
    SensitivityDocument,
    WhatIfDocument,
    pareto_of,
    sensitivity_of,
    what_if,
)
from dpro.analysis.comparison import difference_of
from dpro.analysis.graphs import ranks_built_once
from dpro.analysis.selected import read_selection, select
from dpro.documents import Document, DocumentPart
from dpro.errors import InputError, UsageError
from dpro.opening import is_trace_folder, open_path
from dpro.plugins import extended
from dpro.remote import is_url
from dpro.replay.difference import DifferenceDocument
from dpro.replay.whatif.grammar import with_paths
from dpro.replay.whatif.registry import help_rows, parse_edit
from dpro.selection import parse_selection
from dpro.verdict.verdict import Explanation, account_of, explain, with_account

KEPT = 4  # analyses of the most recent runs
KERNELS = 15


class NoArguments(DocumentPart, frozen=True):
    """No arguments."""


class OfRun(DocumentPart, frozen=True):
    """The arguments of most tools.

    Attributes:
        run: a run directory, or traces of other tools: an absolute path, or one relative to a served folder.
    """

    run: str


class OfReport(OfRun, frozen=True, kw_only=True):
    """Arguments of `report`.

    Attributes:
        run: a run directory or traces.
        top: number of kernels to list.
        steps: steps to report, such as `3-8` or `3,5,7-9`; empty for all.
        ranks: ranks to report, such as `0,2-3`, or by coordinates in the layout, such as `tp=0`; empty for
            all.
    """

    top: int = KERNELS
    steps: str = ""
    ranks: str = ""


class OfReplay(OfRun, frozen=True, kw_only=True):
    """Arguments of `replay`.

    Attributes:
        run: a run directory or traces.
        step: number of a single step to report; null for all.
        window: number of a deep window whose steps to report; null for all.
        steps: steps to report, such as `3-8` or `3,5,7-9`; empty for all.
    """

    step: int | None = None
    window: int | None = None
    steps: str = ""


class OfWhatIf(OfRun, frozen=True, kw_only=True):
    """Arguments of `whatif`.

    Attributes:
        run: a run directory or traces.
        edits: edits to predict together, in order, such as `heal:rank=1`; empty to search for what would
            help.
        budget: largest number of predictions of a search; null for the default.
        steps: steps whose mean is predicted, such as `3-8` or `3,5,7-9`; empty for all.
    """

    edits: tuple[str, ...] = ()
    budget: int | None = None
    steps: str = ""


class OfTwoRuns(DocumentPart, frozen=True):
    """Arguments of `diff`.

    Attributes:
        a: the first run, such as the one before a change.
        b: the second run.
        steps: steps to compare, such as `3-8` or `3,5,7-9`; empty for all.
        ranks: ranks whose work to compare, such as `0,2-3` or `tp=0`; empty for all.
    """

    a: str
    b: str
    steps: str = ""
    ranks: str = ""


class RunsDocument(Document, frozen=True, kw_only=True):
    """The runs that the server can answer questions about.

    Attributes:
        folders: folders that may be read.
        runs: run directories in these folders; folders of traces can be named, too.
    """

    folders: list[str]
    runs: list[str]


class EditExample(DocumentPart, frozen=True):
    """An edit that `whatif` accepts.

    Attributes:
        example: the edit, as text.
        meaning: what the edit changes.
    """

    example: str
    meaning: str


class EditsDocument(Document, frozen=True, kw_only=True):
    """All edits, with one example each.

    Attributes:
        edits: one example per edit.
    """

    edits: list[EditExample]


@dataclass(frozen=True)
class Tool:
    """A tool: description, types of arguments and answer, and the function that answers."""

    meaning: str
    takes: type[DocumentPart]
    gives: type[Document]
    answer: Callable[[Any, Sequence[Path]], Document]


def call(name: str, arguments: Mapping[str, Any], folders: Sequence[Path]) -> Document:
    """Answer one call.

    Raises:
        UsageError: no tool has this name, or the arguments are invalid.
        DproError: the command of that name would raise it.
    """
    if name not in TOOLS:
        raise UsageError(f"no tool {name!r}; there are {', '.join(TOOLS)}")
    tool = TOOLS[name]
    try:
        asked = msgspec.convert(arguments, tool.takes)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name}: {error}") from error
    with ranks_built_once():
        return tool.answer(asked, folders)


def _analysis(path: str, folders: Sequence[Path]) -> Analysis:
    place = readable(path, folders)
    manifest = place / "manifest.json"
    files = [manifest] if manifest.is_file() else [place, *place.rglob("*")]
    return _analysed(place, max(file.lstat().st_mtime_ns for file in files))


@lru_cache(KEPT)
def _analysed(path: Path, _changed_ns: int) -> Analysis:
    return Analysis(open_path(path))


def _info(asked: OfRun, folders: Sequence[Path]) -> InfoDocument:
    analysis = _analysis(asked.run, folders)
    return with_account(info_document(analysis), analysis)


def _report(asked: OfReport, folders: Sequence[Path]) -> Document:
    if asked.top < 1:
        raise UsageError("report: top is at least 1")
    whole = _analysis(asked.run, folders)
    selection = read_selection(asked.steps, asked.ranks, whole.run)
    analysis = select(whole, selection)
    document = report_document(analysis, report_tables(analysis, selection), asked.top, selection)
    document = with_account(document, whole)
    return cast(Document, extended("answered", document, whole.run))


def _replay(asked: OfReplay, folders: Sequence[Path]) -> ReplayDocument:
    analysis = _analysis(asked.run, folders)
    ranges = parse_selection(asked.steps).steps
    document = replay_document(analysis, chosen_steps(analysis, asked.step, asked.window, ranges))
    return with_account(document, analysis)


def _what_if(asked: OfWhatIf, folders: Sequence[Path]) -> WhatIfDocument:
    if asked.budget is not None and (asked.edits or asked.budget < 1):
        raise UsageError("whatif: a budget is at least 1, and for a search: give no edits with it")
    selection = parse_selection(asked.steps)
    edits = [with_paths(parse_edit(text), lambda path: readable(str(path), folders)) for text in asked.edits]
    analysis = _analysis(asked.run, folders)
    document = what_if(analysis, edits, asked.budget, selection=selection).document
    return with_account(document, analysis)


def _diagnose(asked: OfRun, folders: Sequence[Path]) -> Document:
    place = readable(asked.run, folders)
    if is_trace_folder(place):
        from dpro.ingest.dumps import read_dumps

        dumps = read_dumps(place)
        if dumps is not None:
            return diagnosis_document(diagnose_dumps(str(place), dumps.frames, dumps.manifest))
    analysis = _analysis(asked.run, folders)
    document = diagnosis_document(diagnose_tables(analysis) or diagnose_replay(analysis))
    document = with_account(document, analysis)
    return cast(Document, extended("answered", document, analysis.run))


def _diff(asked: OfTwoRuns, folders: Sequence[Path]) -> DifferenceDocument:
    before, after = (_analysis(run, folders) for run in (asked.a, asked.b))
    selection = read_selection(asked.steps, asked.ranks, before.run, after.run)
    difference = difference_of(before, after, selection)
    return replace(with_account(difference, before), account_b=account_of(after))


TOOLS: dict[str, Tool] = {
    "runs": Tool(
        "List the runs that can be asked about.",
        NoArguments,
        RunsDocument,
        lambda _, folders: RunsDocument(folders=list(map(str, folders)), runs=runs_in(folders)),
    ),
    "info": Tool(
        "What a run contains and what it lacks.",
        OfRun,
        InfoDocument,
        _info,
    ),
    "explain": Tool(
        "What limits the job, what is at fault, and what to do first: call this before any other tool.",
        OfRun,
        Explanation,
        lambda asked, folders: explain(_analysis(asked.run, folders)),
    ),
    "diagnose": Tool(
        "Name what hangs or is slow, why, and what it costs per step.", OfRun, DiagnosisDocument, _diagnose
    ),
    "report": Tool(
        "Where the time of each step went, on which kernels and collectives.",
        OfReport,
        ReportDocument,
        _report,
    ),
    "replay": Tool(
        "How well the graph explains what was measured, the critical path, and the trust in predictions.",
        OfReplay,
        ReplayDocument,
        _replay,
    ),
    "whatif": Tool(
        "Predict the step time under edits, with an interval; without edits, rank what would help.",
        OfWhatIf,
        WhatIfDocument,
        _what_if,
    ),
    "edits": Tool(
        "List the edits that `whatif` accepts, by example.",
        NoArguments,
        EditsDocument,
        lambda *_: EditsDocument(edits=[EditExample(*row) for row in help_rows()]),
    ),
    "sensitivity": Tool(
        "How much faster network, kernels, host and input have to be until something else is the limit.",
        OfRun,
        SensitivityDocument,
        lambda asked, folders: sensitivity_of(_analysis(asked.run, folders)),
    ),
    "pareto": Tool(
        "Time against memory, of larger batches and recomputed activations.",
        OfRun,
        ParetoDocument,
        lambda asked, folders: pareto_of(_analysis(asked.run, folders)),
    ),
    "diff": Tool("What explains that run B is slower than run A.", OfTwoRuns, DifferenceDocument, _diff),
}


# A server reads only paths below the folders that its user named, and refuses everything that leads out of
# them: a path, a link anywhere below it, a URL. It also refuses an unfinished run, since reading one would
# write into it.

MAX_LISTED = 200  # runs
MAX_DEPTH = 6  # levels below a folder in which runs are searched


def named_folders(folders: Sequence[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return the folders that may be read, with links resolved; the working directory if none is named.

    Raises:
        UsageError: a path is not a folder, or does not exist.
    """
    named = tuple(Path(folder).resolve() for folder in folders or (".",))
    for folder in named:
        if folder.is_file():
            raise UsageError(f"{folder}: is a file; name its folder, {folder.parent}")
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder")
    return named


def readable(path: str, folders: Sequence[Path]) -> Path:
    """Return the path of a run, of traces, or of a file that an edit names, with links resolved.

    Args:
        path: an absolute path, or one relative to any of the folders.
        folders: folders from `named_folders`.

    Raises:
        InputError: the path does not exist, leads out of the folders, or is an unfinished run.
    """
    if is_url(path):
        raise InputError(f"{path}: is a URL; only what lies in {_folder_names(folders)} is read")
    try:
        places = [(folder / path).resolve() for folder in folders]
        allowed = [place for place in places if _is_below(place, folders)]
        existing = [place for place in allowed if place.exists()]
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{path}: is not a path ({error})") from error
    if not allowed:
        raise InputError(f"{path}: leads out of {_folder_names(folders)}")
    if not existing:
        raise InputError(f"{path}: no such file or folder in {_folder_names(folders)}")
    for link in _links(existing[0]):
        if not _is_below(link.resolve(), folders):
            raise InputError(f"{path}: its link {link.name} leads out of {_folder_names(folders)}")
    _ensure_finished(existing[0])
    return existing[0]


def runs_in(folders: Sequence[Path]) -> list[str]:
    """Return run directories below the folders, sorted, at most `MAX_LISTED`."""
    from dpro.store import is_run

    runs: list[str] = []
    for folder in folders:
        for place, below, _ in os.walk(folder):
            path = Path(place)
            below[:] = sorted(name for name in below if not name.startswith("."))
            if is_run(path):
                runs.append(place)
                below.clear()
            elif len(path.relative_to(folder).parts) >= MAX_DEPTH:
                below.clear()
            if len(runs) >= MAX_LISTED:
                return sorted(runs)
    return sorted(runs)


def _ensure_finished(path: Path) -> None:
    from dpro.collectors.launch.recording import launches

    if path.is_dir() and any(launch.marker.exists() for launch in launches(path)):
        raise InputError(f"{path}: is still being recorded or not finished; `dpro info {path}` finishes it")


def _is_below(path: Path, folders: Sequence[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _links(path: Path) -> Iterator[Path]:
    """Yield the links below a path, and below the folders that these lead to."""
    waiting, seen = [path], set[Path]()
    while waiting:
        top = waiting.pop()
        if top in seen or not top.is_dir():
            continue
        seen.add(top)
        for place, folders, files in os.walk(top):
            for name in (*folders, *files):
                entry = Path(place) / name
                if entry.is_symlink():
                    yield entry
                    waiting.append(entry.resolve())


def _folder_names(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders))
