"""A built graph comes back from its file as it was, or not at all."""

from __future__ import annotations

import ast
import dataclasses
import json
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.fidelity.accuracy import Trust, assess
from dpro.replay.fidelity.by_rank import CondensedRun
from dpro.replay.fidelity.saved import RECORDS, load, save
from dpro.replay.graph import recall
from dpro.replay.kept import built_from
from dpro.replay.timeline import HostsAlone, replay
from dpro.store import Run
from tests.builders import cpu_job, gpu_job


def equal(a: Any, b: Any) -> bool:
    """Whether two records hold the same, down to the types of their arrays."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, pl.DataFrame):
        return a.schema == b.schema and a.equals(b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(
            equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)
        )
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


@pytest.fixture(params=[cpu_job, gpu_job])
def analysed(request, tmp_path) -> tuple[Run, Built, Trust]:
    run = request.param().write(tmp_path / "run")
    built = build_graph(run)
    return run, built, assess(built, replay(built.graph), run.manifest)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "cache" / "graph.npz"


def test_what_is_read_is_what_was_written(analysed, file):
    run, built, trust = analysed
    save(file, built, trust)
    again = load(file, run)
    assert again is not None
    assert equal(again[0], built)
    assert equal(again[1], trust)


def test_a_saved_graph_replays_to_the_same_nanosecond_and_cannot_be_written_to(analysed, file):
    run, built, trust = analysed
    save(file, built, trust)
    graph = load(file, run)[0].graph
    assert replay(graph).start.tolist() == replay(built.graph).start.tolist()
    with pytest.raises(ValueError, match="read-only"):
        graph.nodes.duration[0] = 1


def test_what_is_known_of_a_graph_is_known_again_after_reading(analysed, file):
    run, built, trust = analysed
    save(file, built, trust)
    graph = load(file, run)[0].graph
    assert graph.facts
    assert "names" in {column for fact in graph.facts.values() for column in fact.columns}
    assert all(recall(graph, name) is fact for name, fact in graph.facts.items())


def test_what_several_parts_share_is_written_once(analysed, file):
    _, built, trust = analysed
    numbers, lane = [], built.graph.nodes.lane
    for around in (lane, lane.copy()):
        nodes = dataclasses.replace(built.graph.nodes, around=around)
        graph = dataclasses.replace(built.graph, nodes=nodes, facts={})
        save(file, dataclasses.replace(built, graph=graph), trust)
        with np.load(file) as arrays:
            numbers.append(sum(arrays[name].size for name in arrays.files if name != "outline"))
    assert numbers[1] - numbers[0] == lane.size


def test_no_file_a_cut_file_and_a_file_of_something_else_are_no_graph(analysed, file):
    run, built, trust = analysed
    assert load(file, run) is None
    save(file, built, trust)
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"no archive", whole[:-1]):
        file.write_bytes(content)
        assert load(file, run) is None
    np.savez(file, outline=np.frombuffer(b"[1, 2]", np.uint8))
    assert load(file, run) is None


def test_a_header_that_python_fails_to_parse_is_no_graph(analysed, file, monkeypatch):
    def fail(*arguments: Any, **options: Any) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    run, built, trust = analysed
    save(file, built, trust)
    monkeypatch.setattr("ast.literal_eval", fail)
    assert load(file, run) is None


def test_threads_parse_headers_one_after_the_other(analysed, file, monkeypatch):
    literal_eval, busy, at_once = ast.literal_eval, threading.Semaphore(1), []

    def parse(text: Any) -> Any:
        at_once.append(not busy.acquire(blocking=False))
        time.sleep(0.0002)
        busy.release()
        return literal_eval(text)

    run, built, trust = analysed
    save(file, built, trust)
    monkeypatch.setattr("ast.literal_eval", parse)
    with ThreadPoolExecutor(4) as executor:
        graphs = list(executor.map(lambda _: load(file, run), range(8)))
    assert None not in graphs
    assert at_once
    assert not any(at_once)


def test_a_file_with_one_byte_changed_anywhere_is_no_graph_or_the_same(analysed, file):
    run, built, trust = analysed
    save(file, built, trust)
    whole = bytearray(file.read_bytes())
    for at in np.random.default_rng(0).integers(0, len(whole), 100).tolist():
        damaged = whole.copy()
        damaged[at] ^= 0x10
        file.write_bytes(damaged)
        again = load(file, run)
        assert again is None or (equal(again[0], built) and equal(again[1], trust))


def test_nothing_is_left_behind_where_writing_fails(analysed, file, monkeypatch):
    _, built, trust = analysed

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="full"):
        save(file, built, trust)
    assert list(file.parent.iterdir()) == []


def named_in(hint: Any) -> set[type]:
    """The records of `dpro.replay` that a type names, and those that they name."""
    found = set().union(*map(named_in, typing.get_args(hint)))
    if isinstance(hint, type) and hint.__module__.startswith("dpro.replay."):
        found |= {hint}.union(*map(named_in, typing.get_type_hints(hint).values()))
    return found


def test_all_records_that_a_graph_and_its_judgement_can_hold_are_listed():
    facts = tuple[HostsAlone]  # cached while a graph is built
    assert named_in(tuple[Built, Trust, CondensedRun, facts]) == set(RECORDS.values())


@pytest.mark.parametrize(
    "kind",
    [
        "dpro.replay.fidelity.accuracy:Path.cwd", "dpro.replay.engine:longest_path",
        "dpro.replay.fidelity.saved:save",
        "dpro.replay.graph:Graph", "Timeline", "nothing",
    ],
)  # fmt: skip
def test_a_file_that_names_anything_else_is_no_graph_and_nothing_is_called(analysed, file, kind):
    run, _, _ = analysed
    file.parent.mkdir()
    outline = json.dumps([{kind: {}}, {kind: {"file": str(file), "built": 1, "trust": 2}}])
    np.savez(file, outline=np.frombuffer(outline.encode(), np.uint8))
    before = file.read_bytes()
    assert load(file, run) is None
    assert file.read_bytes() == before
    with pytest.raises(ValueError, match="names"):
        built_from(json.loads(outline), {}, RECORDS, run)
