"""The edit that moves a job to another GPU model: every kernel takes its time there, and the host stays.

Products with shapes are predicted by `dpro.replay.cost.kernels`, from their times here; other kernels by the
limit of their class. CPU time stays, so a job that waits for its host gains nothing. Collectives keep their
measured cost, since the links of the other machine are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.classify import classify
from dpro.errors import Unanswerable, UsageError
from dpro.recorders import SHAPES, how_to_record
from dpro.replay.cost.kernels.estimate import Sources
from dpro.replay.cost.kernels.products import PRODUCTS, sources_of
from dpro.replay.cost.kernels.recorded import SCHEMA, on_another_device, summed
from dpro.replay.cost.kernels.roofline import GPUS, common_model, model_named, stored_as
from dpro.replay.graph import Graph, NodeKind, once
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.kernels import COMPUTES
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.scope import products_of_kernels
from dpro.schema import WORKERS
from dpro.selection import parse_ranges
from dpro.words import suggest


@dataclass(frozen=True)
class Device(Edit):
    """Kernels take as long as on another GPU model."""

    name = "device"
    summary = "run the job's kernels on another GPU model"
    example = "device:to=H200,ranks=0-3"
    needs = "GPU kernels and a known GPU; shapes (`--shapes`) narrow the interval"
    assumes = (
        "host speed, work per kernel, and the cost of collectives and host copies stay unchanged, and "
        "the job fits into the other GPU's memory"
    )
    source = (
        "products: ten fitted numbers per device, times the root of measured over predicted here "
        "(docs/devices.md); others: ratio of the bandwidths or peaks that devices reach"
    )
    is_advice = False
    effort = "money"
    to: str = key("GPU model by its vendor's name: H200, B200, MI300X")
    ranks: str = key("ranks to move, such as 0,2-3; default: all", "")
    doubt: float = 0.1

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the maker's next model with faster memory and no slower arithmetic."""
        current = min(_devices_of(facts.graph).values(), key=lambda name: GPUS[name].gbps)
        sheet, amd = GPUS[current], current.startswith("MI")
        faster = [
            (gpu.gbps, name)
            for name, gpu in GPUS.items()
            if gpu.gbps > sheet.gbps and name.startswith("MI") == amd
            if max(gpu.tflops.values()) >= max(sheet.tflops.values())
        ]
        return [cls(name) for _, name in sorted(faster)[:1]]

    def bound(self, facts: RunFacts) -> float:
        return facts.on_path(facts.graph.nodes.kind == NodeKind.KERNEL)

    def __post_init__(self) -> None:
        """Raise for unknown GPU models, and for invalid ranks."""
        super().__post_init__()
        if self._model() not in GPUS:
            raise UsageError(f"device: no data sheet of {self.to!r}{suggest(self.to, GPUS)}")
        if self.ranks:
            parse_ranges(self.ranks, "device: ranks")

    def apply(self, graph: Graph) -> Graph:
        nodes, predicted = self._predicted(graph)
        return _with(graph, nodes, predicted["us"].to_numpy())

    def notes(self, graph: Graph) -> tuple[str, ...]:
        nodes, predicted = self._predicted(graph)
        if not nodes.size:
            return (f"the GPUs are of that model already: {self._model()}",)
        was = graph.nodes.duration[nodes]
        total = max(int(was.sum()), 1)
        shares = predicted.with_columns(was=pl.Series(was)).group_by("method").agg(pl.col("was").sum())
        lines = [
            f"{share / total:.0%} of kernel time is predicted by {_METHODS.get(method, method)}"
            for method, share in shares.sort("was", "method", descending=[True, False]).iter_rows()
        ]
        us, low, high = summed(predicted)
        least, now, most = (f"{value * 1e3 / total:.2f}" for value in (low, us, high))
        lines.append(f"kernels take {now} of their time there ({least} to {most})")
        if (graph.nodes.kind == NodeKind.TRANSFER).any():
            lines.append("collectives keep their measured cost: the links of the other machine are unknown")
        return tuple(lines)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        nodes, predicted = self._predicted(graph)
        if not nodes.size:
            return ()
        us, low, high = summed(predicted)
        times = predicted["us"].to_numpy()
        return tuple(_with(graph, nodes, times * end / max(us, 1e-9)) for end in (low, high))

    def describe(self) -> str:
        return f"{f'ranks {self.ranks}' if self.ranks else 'all ranks'} on {self._model()}"

    def how(self) -> str:
        return f"run the job on machines with {self._model()}"

    def _model(self) -> str:
        return self.to if self.to in GPUS else model_named(self.to)

    def _predicted(self, graph: Graph) -> tuple[Ints, pl.DataFrame]:
        """Return the kernels that change, and their predictions; none where the model is already this one.

        Raises:
            Unanswerable: no kernels, their GPUs are not known, or the other cannot run one of them.
        """
        return once(graph, self, self._predict)

    def _predict(self, graph: Graph) -> tuple[Ints, pl.DataFrame]:
        kernels = (graph.nodes.kind == NodeKind.KERNEL) & _on_ranks(graph, self.ranks)
        if not kernels.any():
            raise Unanswerable("no such GPU kernels in the run: the duration of CPU work on a GPU is unknown")
        devices, to = _devices_of(graph), self._model()
        parts = []
        for device in sorted(set(devices.values()) - {to}):
            ranks = [rank for rank, model in devices.items() if model == device]
            moving = kernels & np.isin(graph.nodes.rank, ranks)
            if moving.any():
                nodes, frame = _frame(graph, moving)
                sources = _sources(graph.products, device, to)
                predicted = on_another_device(frame, device, to, sources)
                parts.append(predicted.with_columns(node=pl.Series(nodes)))
        if not parts:
            return np.zeros(0, np.int64), pl.DataFrame({"us": np.zeros(0)})
        predicted_kernels = pl.concat(parts).sort("node")
        refused = predicted_kernels.filter(pl.col("us").is_null())
        if refused.height:
            raise Unanswerable(f"{refused.height} kernels cannot be predicted: {refused['reason'][0]}")
        return predicted_kernels["node"].to_numpy(), predicted_kernels.drop("node")


_LAST: list[tuple[pl.DataFrame | None, tuple[str, ...], Sources]] = []  # at most one: the latest


def _sources(products: pl.DataFrame | None, *devices: str) -> Sources:
    """Return the sources of two devices, learned once per table."""
    if not _LAST or _LAST[0][0] is not products or _LAST[0][1] != devices:
        _LAST[:] = [(products, devices, sources_of(products, *devices))]
    return _LAST[0][2]


_METHODS = {
    "measured x table": "measurements on this and on that GPU",
    "measured x trees": "measurements on this GPU and a model learned from tables of that GPU",
    "table": "measurements on that GPU",
    "trees": "a model learned from tables of that GPU",
    "measured x fitted": "measurements on this GPU and parameters fitted to both GPUs",
    "measured x sheet": "measurements on this GPU and the data sheet of that GPU, which was never measured",
    "class": "the class of the kernel, without shapes",
    "fitted": "parameters fitted to that GPU",
    "sheet": "the data sheet of that GPU",
}


def _with(graph: Graph, nodes: Ints, us: Floats) -> Graph:
    duration = graph.nodes.duration.copy()
    duration[nodes] = np.rint(us * 1e3).astype(np.int64)
    return graph.with_durations(duration)


def _on_ranks(graph: Graph, ranks: str) -> Bools:
    if not ranks:
        return np.ones(graph.num_nodes, np.bool_)
    chosen = np.zeros(graph.num_nodes, np.bool_)
    for first, last in parse_ranges(ranks, "device: ranks"):
        chosen |= (graph.nodes.rank >= first) & (graph.nodes.rank <= last)
    return chosen


def _devices_of(graph: Graph) -> dict[int, str]:
    """Return the GPU model of each rank.

    Raises:
        Unanswerable: the run does not record all of them.
    """
    ranks = graph.ranks
    names = graph.run.manifest.gpus if graph.run is not None else []
    if model := common_model(names):
        return dict.fromkeys(ranks, model)
    workers = [] if graph.run is None else graph.run.table(WORKERS, ["rank", "gpu_name"]).rows()
    models = {rank: model_named(name) for rank, name in workers}
    if not all(models.get(rank) for rank in ranks):
        listed = ", ".join(sorted(set(names))) or "the run names none; `dpro record` records it"
        raise Unanswerable(f"the GPU of the kernels is not known ({listed}): its data sheet is needed")
    return {rank: models[rank] for rank in ranks}


def products_of(graph: Graph) -> pl.DataFrame:
    """Return the times of matrix products in a run, with the columns of `PRODUCTS`.

    Raises:
        Unanswerable: its GPUs are not known, or it has no products with shapes.
    """
    devices = _devices_of(graph)
    nodes, frame = _frame(graph, graph.nodes.kind == NodeKind.KERNEL)
    names = [devices[rank] for rank in graph.nodes.rank[nodes].tolist()]
    products = frame.with_columns(device=pl.Series(names, dtype=pl.String), software=pl.lit("trace")).filter(
        pl.col("kind") == "product"
    )
    if products.is_empty():
        raise Unanswerable(
            f"no matmul with shapes in the run: record with {how_to_record(SHAPES, graph.run)}"
        )
    return products.select(list(PRODUCTS))


def _frame(graph: Graph, kernels: Bools) -> tuple[Ints, pl.DataFrame]:
    """Return nodes, and their kernels as rows of `SCHEMA`: products where shapes and precision are known.

    Of an operator that launched several kernels, the longest is the product.
    """
    nodes = np.flatnonzero(kernels)
    names = graph.nodes.name[nodes]
    dtypes = np.array([stored_as(name) for name in graph.names])
    kinds = np.array(["computes" if classify(name).kind in COMPUTES else "moves" for name in graph.names])
    frame = pl.DataFrame(
        {
            "node": nodes,
            "kind": kinds[names],
            "dtype": dtypes[names],
            "us": np.maximum(graph.nodes.duration[nodes], 1) / 1e3,
        }
    )
    sizes = products_of_kernels(graph, kernels).join(frame.select("node", "dtype", "us"), on="node")
    longest = sizes.filter(pl.col("dtype") != "").sort("us").unique(["rank", "span_id"], keep="last")
    joined = frame.join(longest.select("node", "batch", "m", "n", "k"), on="node", how="left").sort("node")
    product = pl.col("m").is_not_null() & (pl.col("kind") == "computes")
    shaped = joined.with_columns(
        kind=pl.when(product).then(pl.lit("product")).otherwise("kind"),
        **{name: pl.when(product).then(name).otherwise(0.0) for name in ("batch", "m", "n", "k")},
    )
    return nodes, shaped.select(list(SCHEMA)).cast(SCHEMA)  # type: ignore[arg-type]
