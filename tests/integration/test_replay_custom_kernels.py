"""Communication without a library: custom kernels, kernels of expert parallelism, kernels in CUDA graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro import classify
from dpro.ingest.importer import import_sources
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.graph import EdgeKind, NodeKind
from dpro.store import open_run
from tests.builders import Seen
from tests.traces import cpu_op, kernel, launch, write

CLASSES = "[[class]]\npattern = 'my_ring'\nkind = 'communication'\nop = 'all_reduce'\n"
DISPATCH = "void deep_ep::intranode::dispatch<8, 768, 8192>(args)"


@pytest.fixture
def own_classes(monkeypatch, tmp_path):
    """A table of kernels in which the user says what `my_ring_exchange` does."""

    def forget() -> None:
        for cached in (classify.classify, classify.own_classes):
            cached.cache_clear()

    (tmp_path / "classes.toml").write_text(CLASSES)
    monkeypatch.setenv("DPRO_CLASSES", str(tmp_path / "classes.toml"))
    forget()
    yield
    monkeypatch.undo()
    forget()


def _job(folder: Path, name: str, in_graph: bool) -> Built:
    """Two ranks, rank 1 late by 40 us: six times a kernel and an exchange, launched alone or together."""
    ends = np.cumsum([400, 470, 430, 520, 450, 490]).tolist()
    for rank in (0, 1):
        events = [cpu_op("step", 0, 3000)]
        for index, end in enumerate(ends):
            begin, number = end - 300, 10 * index
            events.append(
                launch(begin, 10, number, name="cudaGraphLaunch" if in_graph else "cudaLaunchKernel")
            )
            events.append(kernel("gemm", begin + 15, 100 + 40 * rank, number))
            if not in_graph:
                events.append(launch(begin + 12, 10, number + 1))
            exchange = begin + 116 + 40 * rank
            events.append(kernel(name, exchange, end - exchange, number if in_graph else number + 1))
        facts = {"rank": rank, "world_size": 2, "backend": "nccl"}
        write(folder / f"rank{rank}.json.gz", events, distributedInfo=facts, host_name="node0")
    import_sources([folder], folder / "run")
    return build_graph(open_run(folder / "run"))


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("name", ["my_ring_exchange", DISPATCH])
def test_such_kernels_meet_on_all_ranks_and_waiting_in_them_is_not_moving(
    tmp_path, own_classes, name, in_graph
):
    built = _job(tmp_path / "in", name, in_graph)
    assert built.matching.rows["members"].to_list() == [2] * 12
    nodes = built.graph.nodes
    assert (nodes.kind == NodeKind.RENDEZVOUS).sum() == 6
    assert set(nodes.duration[nodes.kind == NodeKind.TRANSFER] // 1000) == {144}  # 184 less the 40 of waiting
    seen = Seen(built.graph)
    late = seen.lasting("gemm", 70, rank=1)
    moved = [late.start(name, rank) - seen.start(name, rank) for rank in (0, 1)]
    assert moved == [70, 70]
    # Of a graph's launch only the first kernel hangs on the call, the other on it.
    on_calls = len(seen.edges(EdgeKind.LAUNCH))
    assert on_calls == (12 if in_graph else 24)


def test_unknown_kernels_are_taken_for_compute_of_their_own_rank(tmp_path):
    built = _job(tmp_path / "in", "my_ring_exchange", in_graph=False)
    assert built.matching.rows.is_empty()
    late = Seen(built.graph).lasting("gemm", 70, rank=1)
    assert late.start("my_ring_exchange", 0) == Seen(built.graph).start("my_ring_exchange", 0)
