"""The mesh of a job: its axes of parallelism, and the coordinates of every rank on them.

Takes a run's process groups, calls, buckets and workers, with coordinates recorded from the job's own meshes,
or a layout that the user states. Returns a `Mesh`, the axes along which the ranks of a group differ, and an
axis for each kind of communication of a graph. An axis is named only if a mesh, a description or the use of
its groups implies a name.

An axis is a family of disjoint groups of one size. Families are the axes of a grid if, for each, the other
families connect ranks into as many parts as the axis is long, and each of its groups has one rank in each
part. Experts are not an axis of the grid where their groups divide ranks that its axes already contain: they
are an overlay on those axes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from operator import mul
from typing import NamedTuple

import polars as pl

from dpro.classify import REDUCTIONS
from dpro.documents import DocumentPart
from dpro.errors import UsageError
from dpro.limits import MAX_RANKS
from dpro.members import members_of
from dpro.replay.alignment.match import group_label
from dpro.replay.graph import Graph
from dpro.replay.job_kind import is_backward, kind_of
from dpro.replay.kept import kept_as
from dpro.schema import BUCKETS, COLLECTIVES, PROCESS_GROUPS, SPANS, STEPS, WORKERS
from dpro.store import Run
from dpro.words import first_few, short_name, whole_number

AXES = ("dp", "pp", "cp", "ep", "tp")  # the order in which a layout is written
STATED, MESH, DESCRIPTIONS, ALGEBRA = "stated", "mesh", "descriptions", "algebra"
MEGATRON_ORDER = ("tp", "cp", "ep", "dp", "pp")  # the first varies fastest with the number of a rank
DESCRIBED: Mapping[
    str, str
] = {  # names of Megatron-core; torch describes the groups of a mesh's axis as `mesh_NAME`
    "data_parallel_group": "dp",
    "data_parallel_group_with_cp": "dp",  # the finer grid takes precedence where there is context parallelism
    "tensor_model_parallel_group": "tp",
    "pipeline_model_parallel_group": "pp",
    "context_parallel_group": "cp",
    "expert_model_parallel_group": "ep",
    **{f"mesh_{axis}": axis for axis in AXES},
}
_NO_GROUP = "no group"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
MIN_ACTIVATION_BYTES = 1 << 16  # smaller reductions in a forward pass are a loss, a count or a norm
MIN_ACTIVATIONS = 0.1  # share of a group's bytes in forward: below, they are metrics or batch statistics
EXPERTS = "ep"
BY = " x "  # between the names of axes
_MAX_FILLED = 1 << 20  # ranks up to which missing coordinates are filled in
_MAX_FAMILIES = 12  # families whose combinations are tried

Coordinates = Mapping[int, tuple[int, ...]]


class RankGroup(NamedTuple):
    """A process group: its description (empty where unknown), global ranks, and uses.

    `ops` has the operations called on it, `GRADIENTS` where it reduces recorded buckets, and `ACTIVATIONS`
    where forward passes reduce on it.
    """

    description: str
    ranks: frozenset[int]
    ops: frozenset[str] = frozenset()


class Axis(DocumentPart, frozen=True):
    """An axis of parallelism.

    Attributes:
        name: dp, pp, cp, ep or tp; empty where unknown.
        size: number of ranks along it.
    """

    name: str
    size: int


class Overlay(NamedTuple):
    """An axis whose groups divide ranks that the axes of the grid already contain.

    Attributes:
        name: `ep`.
        size: number of ranks along it.
        over: the axes along which ranks of one of its groups differ.
        groups: the ranks of each of its groups.
    """

    name: str
    size: int
    over: tuple[str, ...]
    groups: frozenset[frozenset[int]]


class Mesh(NamedTuple):
    """The layout of a job.

    Attributes:
        num_ranks: number of ranks of the job.
        axes: the axes longer than one; empty where unknown.
        coordinates: one number per axis for each rank whose position is known.
        source: `stated`, `mesh`, `descriptions` or `algebra`; empty where unknown.
        ambiguity: open questions, one sentence each.
        overlays: axes laid over the grid.
    """

    num_ranks: int
    axes: tuple[Axis, ...] = ()
    coordinates: Coordinates = {}  # noqa: RUF012 of a tuple that never changes
    source: str = ""
    ambiguity: tuple[str, ...] = ()
    overlays: tuple[Overlay, ...] = ()


class _Family(NamedTuple):
    name: str
    groups: tuple[frozenset[int], ...]
    ops: frozenset[str]

    @property
    def size(self) -> int:
        return len(self.groups[0])


def mesh_of(
    groups: Iterable[RankGroup],
    recorded: Mapping[int, Mapping[str, int]],
    num_ranks: int,
    sizes: Mapping[str, int] | None = None,
) -> Mesh:
    """Return the layout of a job: from its own meshes, else from its groups.

    Args:
        groups: process groups, in the order in which they were made.
        recorded: coordinates by rank and axis, as the job's meshes state them; axes without one are left out.
        sizes: recorded sizes of axes, where ranks with larger coordinates may be missing.
    """
    stated = _from_mesh(recorded, num_ranks, sizes or {})
    return stated if stated.axes else _from_groups(list(groups), num_ranks)


def mesh_in_words(mesh: Mesh) -> str:
    """Word a mesh in one line, as `64 ranks = dp 8 x pp 4 x tp 2, ep 4 over dp`; empty without axes."""
    axes = BY.join(f"{axis.name} {axis.size}" if axis.name else f"axis of {axis.size}" for axis in mesh.axes)
    laid = [f", {overlay.name} {overlay.size} over {BY.join(overlay.over)}" for overlay in mesh.overlays]
    return f"{mesh.num_ranks} ranks = {axes}{''.join(laid)}" if axes else ""


def axis_of_group(mesh: Mesh, ranks: Collection[int], description: str = "") -> str:
    """Return the axis along which the ranks of a group differ, over all of it or a part.

    Args:
        description: the job's description of the group; empty where unknown.

    Returns:
        `dp`; `dp x cp` where they differ along several; `ep` for a group of experts. Empty where the group is
        one rank, or the coordinates of a rank or the name of an axis are unknown.
    """
    members = frozenset(ranks)
    laid = next((overlay.name for overlay in mesh.overlays if members in overlay.groups), "")
    along = _axes_between(mesh, members)
    described = DESCRIBED.get(description.lower(), "")
    if laid and (described == laid or not _is_whole(mesh, along, members)):
        return laid
    return BY.join(along)


def named_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes by which ranks are selected and grouped: those with a name, then overlays."""
    names = [*(axis.name for axis in mesh.axes), *(overlay.name for overlay in mesh.overlays)]
    return tuple(name for name in names if name)


def places_along(mesh: Mesh, name: str) -> dict[int, int]:
    """Return the index of each rank along an axis, from 0; ranks without a known one are left out.

    Args:
        name: one of `named_axes`. Along an overlay, the ranks of each group are numbered in order.
    """
    for number, axis in enumerate(mesh.axes):
        if axis.name == name:
            places = {rank: place[number] for rank, place in mesh.coordinates.items() if place}
            return {rank: place for rank, place in places.items() if place >= 0}
    groups = [group for overlay in mesh.overlays if overlay.name == name for group in overlay.groups]
    return {rank: place for group in groups for place, rank in enumerate(sorted(group))}


def _axes_between(mesh: Mesh, ranks: Collection[int]) -> tuple[str, ...]:
    """Return the names of the axes along which ranks differ; empty if a coordinate or a name is unknown."""
    places = [mesh.coordinates.get(rank, ()) for rank in ranks]
    if not all(places):
        return ()
    differ = [axis for axis, along in zip(mesh.axes, zip(*places)) if len(set(along)) > 1]
    unknown = any(-1 in place for place in places) or not all(axis.name for axis in differ)
    return () if unknown else tuple(axis.name for axis in differ)


def _is_whole(mesh: Mesh, along: Collection[str], ranks: Collection[int]) -> bool:
    """Return whether ranks that differ along some axes are all ranks along these axes."""
    return len(ranks) == math.prod(axis.size for axis in mesh.axes if axis.name in along)


def _from_mesh(recorded: Mapping[int, Mapping[str, int]], num_ranks: int, stated: Mapping[str, int]) -> Mesh:
    names = [name for name in AXES if any(place.get(name, -1) >= 0 for place in recorded.values())]
    shown = {name: 1 + max(place.get(name, -1) for place in recorded.values()) for name in names}
    sizes = {name: max(shown[name], stated.get(name, 0)) for name in names}
    axes = tuple(Axis(name, sizes[name]) for name in names if sizes[name] > 1)
    dense = tuple(axis for axis in axes if axis.name != EXPERTS)
    are_laid_over = len(dense) < len(axes) and math.prod(axis.size for axis in dense) == num_ranks
    axes = dense if are_laid_over else axes
    if not axes:
        return Mesh(num_ranks)
    places = {rank: tuple(place.get(axis.name, -1) for axis in axes) for rank, place in recorded.items()}
    product = math.prod(axis.size for axis in axes)
    open_ = () if product == num_ranks else (f"The recorded axes have {product} of {num_ranks} ranks.",)
    mesh = Mesh(num_ranks, axes, _with_missing(axes, places, num_ranks), MESH, open_)
    if not are_laid_over:
        return mesh
    experts = {rank: place[EXPERTS] for rank, place in recorded.items() if place.get(EXPERTS, -1) >= 0}
    return mesh._replace(overlays=_overlays(mesh, _groups_of_experts(mesh, experts), sizes[EXPERTS]))


def _with_missing(axes: Sequence[Axis], places: Coordinates, num_ranks: int) -> Coordinates:
    """Add the ranks that were not recorded, if exactly one order of the axes numbers the recorded ones."""
    sizes = [axis.size for axis in axes]
    is_known = math.prod(sizes) == num_ranks <= _MAX_FILLED and not any(
        -1 in place for place in places.values()
    )
    if len(places) >= num_ranks or not is_known:
        return places
    fitting = {
        strides
        for order in permutations(range(len(sizes)))  # the first is the slowest
        for strides in [_strides(order, sizes)]
        if all(rank == sum(map(mul, place, strides)) for rank, place in places.items())
    }
    if len(fitting) != 1:
        return places
    strides = fitting.pop()
    return {rank: tuple(rank // by % size for by, size in zip(strides, sizes)) for rank in range(num_ranks)}


def _strides(order: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return for each axis the difference in rank number between neighbours along it."""
    return tuple(
        math.prod(sizes[slower] for slower in order[order.index(a) + 1 :]) for a in range(len(sizes))
    )


def _groups_of_experts(mesh: Mesh, experts: Mapping[int, int]) -> list[frozenset[int]]:
    """Return the groups of experts by their coordinates, along the fewest axes that determine these.

    Ranks with the same expert coordinate are assigned to consecutive groups, in order.
    """
    numbers = range(len(mesh.axes))
    subsets = [axes for count in numbers for axes in combinations(numbers, count + 1)]
    for along in subsets:
        follows: dict[tuple[int, ...], set[int]] = {}
        for rank, place in experts.items():
            follows.setdefault(tuple(mesh.coordinates[rank][axis] for axis in along), set()).add(place)
        if all(len(follow) == 1 for follow in follows.values()):
            break
    else:
        return []
    turns: dict[tuple[int, ...], int] = {}
    groups: dict[tuple[int, ...], set[int]] = {}
    for rank, place in sorted(experts.items()):
        others = tuple(place for axis, place in enumerate(mesh.coordinates[rank]) if axis not in along)
        turn = turns[*others, place] = turns.get((*others, place), -1) + 1
        groups.setdefault((*others, turn), set()).add(rank)
    return [frozenset(ranks) for ranks in groups.values()]


def _overlays(mesh: Mesh, groups: Sequence[frozenset[int]], size: int) -> tuple[Overlay, ...]:
    """Return the overlay of experts; empty where the groups do not fit one set of axes and one size."""
    over = {_axes_between(mesh, ranks) for ranks in groups}
    if len(over) != 1 or over == {()} or any(len(ranks) != size for ranks in groups):
        return ()
    return (Overlay(EXPERTS, size, over.pop(), frozenset(groups)),)


def _from_groups(groups: Sequence[RankGroup], num_ranks: int) -> Mesh:
    families = _families(groups, num_ranks)[:_MAX_FAMILIES]
    grids = _best_grids(families, num_ranks)
    if not grids:
        sizes = ", ".join(str(size) for size in sorted({family.size for family in families}))
        return Mesh(
            num_ranks, ambiguity=(f"The groups of {sizes} ranks do not form a grid.",) if sizes else ()
        )
    grid = sorted(grids[0], key=lambda family: AXES.index(family.name) if family.name else len(AXES))
    parts = [_parts(grid, number, num_ranks) for number in range(len(grid))]
    places = {rank: tuple(part[rank] for part in parts) for rank in range(num_ranks)}
    described = all(family.name in {_described_axis(group) for group in groups} for family in grid)
    source = DESCRIPTIONS if described and all(family.name for family in grid) else ALGEBRA
    axes = tuple(Axis(_name_by_use(family), family.size) for family in grid)
    mesh = Mesh(num_ranks, axes, places, source, _ambiguity(grid, axes, len(grids)))
    if any(family.name == EXPERTS for family in grid):
        return mesh
    experts = list(dict.fromkeys(group.ranks for group in groups if _described_axis(group) == EXPERTS))
    is_whole = bool(experts) and len(experts[0]) > 1 and _covers(experts, num_ranks)
    return mesh._replace(overlays=_overlays(mesh, experts, len(experts[0])) if is_whole else ())


def _ambiguity(grid: Sequence[_Family], axes: Sequence[Axis], num_grids: int) -> tuple[str, ...]:
    said = []
    for family, axis in zip(grid, axes):
        if family.ops == {_NO_GROUP}:
            said.append(f"No group shows the axis of size {axis.size}: ranks are taken in order.")
        elif not family.name and GRADIENTS not in family.ops:
            use = f"whose calls are {', '.join(map(short_name, sorted(family.ops)))}"
            use = use if family.ops else "without any recorded call"
            kind = f"its use implies {axis.name}" if axis.name else "its kind is unknown"
            said.append(f"The axis of size {axis.size}, {use}, has no name: {kind}.")
    unnamed = [axis.size for axis in axes if not axis.name]
    if len(set(unnamed)) < len(unnamed):
        said.append("Unnamed axes of the same size can be distinguished only by the ranks of their groups.")
    if num_grids > 1:
        said.append(f"The groups fit {num_grids} grids of that many axes; the best described is shown.")
    return tuple(said)


def _families(groups: Sequence[RankGroup], num_ranks: int) -> list[_Family]:
    """Return families of disjoint groups of one size that cover all ranks, named ones first.

    Groups belong together by their description; else by the distances between their ranks, which differ from
    axis to axis where ranks are numbered along the axes; else in the order in which they were made.
    """
    families: dict[frozenset[frozenset[int]], _Family] = {}
    ops: dict[frozenset[int], frozenset[str]] = {}
    for group in groups:
        ops[group.ranks] = ops.get(group.ranks, frozenset()) | group.ops
    named = [group for group in groups if _described_axis(group) and len(group.ranks) > 1]
    plain = [ranks for ranks in dict.fromkeys(group.ranks for group in groups) if len(ranks) > 1]
    sets: list[tuple[str, list[frozenset[int]]]] = []
    for description in dict.fromkeys(group.description.lower() for group in named):
        same = [group for group in named if group.description.lower() == description]
        sets.append((_described_axis(same[0]), list(dict.fromkeys(group.ranks for group in same))))
    # Experts last: groups that are also those of another axis belong to that axis.
    sets.sort(key=lambda named_set: named_set[0] == EXPERTS)
    by_distance: dict[tuple[int, ...], list[frozenset[int]]] = {}
    for ranks in plain:
        first, *others = sorted(ranks)
        by_distance.setdefault(tuple(rank - first for rank in others), []).append(ranks)
    sets += [("", disjoint) for disjoint in by_distance.values()]
    sets += [("", disjoint) for disjoint in _first_fit(plain)]
    for name, disjoint in sets:
        if _covers(disjoint, num_ranks):
            used = frozenset[str]().union(*(ops[ranks] for ranks in disjoint))
            families.setdefault(frozenset(disjoint), _Family(name, tuple(disjoint), used))
    return list(families.values())


def _first_fit(groups: Iterable[frozenset[int]]) -> list[list[frozenset[int]]]:
    """Sort groups into sets of disjoint groups of one size, each into the first set that it fits."""
    fitted: list[tuple[list[frozenset[int]], set[int]]] = []
    for ranks in groups:
        for groups_of_set, held in fitted:
            if len(groups_of_set[0]) == len(ranks) and held.isdisjoint(ranks):
                groups_of_set.append(ranks)
                held |= ranks
                break
        else:
            fitted.append(([ranks], set(ranks)))
    return [groups_of_set for groups_of_set, _ in fitted]


def _covers(groups: Sequence[frozenset[int]], num_ranks: int) -> bool:
    same = len({len(ranks) for ranks in groups}) == 1
    total = sum(len(ranks) for ranks in groups)
    return same and total == num_ranks and frozenset[int]().union(*groups) == frozenset(range(num_ranks))


def _best_grids(families: Sequence[_Family], num_ranks: int) -> list[tuple[_Family, ...]]:
    """Return grids of described families, else of those and an axis without groups, else of any families.

    Groups of experts are tried second, since they are laid over the ranks of other axes.
    """
    named = [family for family in families if family.name]
    dense = [family for family in named if family.name != "ep"]
    for candidates in (dense, named, _with_missing_axis(dense, num_ranks), families):
        if grids := _grids(candidates, num_ranks):
            return grids
    return []


def _with_missing_axis(families: Sequence[_Family], num_ranks: int) -> list[_Family]:
    """Return one family of each name, and the missing axis: ranks at the same position of each part."""
    first = list({family.name: family for family in reversed(families)}.values())
    if not first:
        return []
    part = _parts(first, len(first), num_ranks)
    blocks = [[rank for rank in range(num_ranks) if part[rank] == number] for number in range(max(part) + 1)]
    if len(blocks) < 2 or len({len(block) for block in blocks}) > 1:
        return []
    return [*first, _Family("", tuple(frozenset(ranks) for ranks in zip(*blocks)), frozenset({_NO_GROUP}))]


def _grids(families: Sequence[_Family], num_ranks: int) -> list[tuple[_Family, ...]]:
    """Return grids with the most axes that cover all ranks and, of those, the most names; early groups first.

    Two families of one name are never axes of one grid.
    """
    for count in range(len(families), 0, -1):
        grids = [
            grid
            for grid in combinations(families, count)
            if math.prod(family.size for family in grid) == num_ranks
            and _names_differ(grid)
            and _is_grid(grid, num_ranks)
        ]
        if grids:
            names = [sum(bool(family.name) for family in grid) for grid in grids]
            return [grid for grid, named in zip(grids, names) if named == max(names)]
    return []


def _names_differ(families: Sequence[_Family]) -> bool:
    names = [family.name for family in families if family.name]
    return len(set(names)) == len(names)


def _is_grid(families: Sequence[_Family], num_ranks: int) -> bool:
    for number, family in enumerate(families):
        part = _parts(families, number, num_ranks)
        if max(part) + 1 != family.size:
            return False
        if any(len({part[rank] for rank in ranks}) != family.size for ranks in family.groups):
            return False
    return True


def _parts(families: Sequence[_Family], axis: int, num_ranks: int) -> list[int]:
    """Return [num_ranks] the part of each rank: ranks that the axes other than `axis` connect share one.

    Parts are numbered in the order of their lowest rank.
    """
    root = list(range(num_ranks))

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for number, family in enumerate(families):
        if number != axis:
            for ranks in family.groups:
                lowest = min(find(rank) for rank in ranks)
                for rank in ranks:
                    root[find(rank)] = lowest
    numbers: dict[int, int] = {}
    return [numbers.setdefault(find(rank), len(numbers)) for rank in range(num_ranks)]


def _described_axis(group: RankGroup) -> str:
    return DESCRIBED.get(group.description.lower(), "")


_OF_SHARDS = {*REDUCTIONS, "all_gather", "broadcast", "barrier", ACTIVATIONS}


def _name_by_use(family: _Family) -> str:
    """Return the name of a family, else the axis that its calls imply.

    Only the groups of a pipeline do nothing but send and receive. Only ranks with parts of one layer sum its
    activations; experts and embedding tables also exchange data in other ways.
    """
    if family.name:
        return family.name
    if GRADIENTS in family.ops:
        return "dp"
    messages = {"send", "recv", "send_recv"}
    if family.ops and family.ops <= messages:
        return "pp"
    return "tp" if ACTIVATIONS in family.ops and family.ops <= _OF_SHARDS else ""


# The mesh of a run.


def mesh_of_run(run: Run) -> Mesh:
    """Return the mesh of a run."""
    places = run.table(WORKERS).filter(pl.col("rank") >= 0)
    recorded = {
        row["rank"]: {axis: row[axis] for axis in AXES if row[axis] >= 0} for row in places.to_dicts()
    }
    sizes = {axis: max(places[f"{axis}_size"].to_list(), default=-1) for axis in AXES}
    groups, num_ranks = groups_of(run), run.manifest.world_size
    if run.layout:
        return _stated_mesh(run.layout, groups, num_ranks)
    mesh = mesh_of(groups, recorded, num_ranks, sizes)
    if all(axis.name for axis in mesh.axes):
        return mesh
    return mesh_of(_with_activations(run, groups), recorded, num_ranks, sizes)


def parse_axes(text: str) -> dict[str, int]:
    """Parse a layout of `--layout`, such as `tp=8` or `dp=4,tp=2`.

    Raises:
        UsageError: an axis is unknown, or a size is not a number or out of bounds.
    """
    layout = {}
    for part in filter(None, text.split(",")):
        axis, _, size = (word.strip() for word in part.partition("="))
        if axis not in AXES:
            raise UsageError(f"--layout {text}: {axis} is not an axis; use {', '.join(AXES)}")
        if not 1 <= (number := whole_number(size)) <= MAX_RANKS:
            raise UsageError(f"--layout {text}: {axis} has to be a number of ranks from 1 to {MAX_RANKS:,}")
        layout[axis] = number
    if not layout:
        raise UsageError("--layout: give one such as dp=8,tp=4,pp=2")
    return layout


def with_layout(run: Run, layout: Mapping[str, int]) -> Run:
    """Return the run with a layout stated by its user; data parallelism fills up an incomplete layout.

    Args:
        layout: ranks along some of `AXES`.

    Raises:
        UsageError: the layout has another number of ranks, or a group of the run does not fit its axes.
    """
    num_ranks = run.manifest.world_size
    given = ", ".join(f"{axis}={size}" for axis, size in layout.items())
    dense = math.prod(size for axis, size in layout.items() if axis != EXPERTS)
    if "dp" not in layout and dense and num_ranks % dense == 0:
        layout = {**layout, "dp": num_ranks // dense}
        dense = num_ranks
    if dense != num_ranks:
        raise UsageError(f"--layout {given} has {dense} ranks; the run has {num_ranks}")
    if layout["dp"] % layout.get(EXPERTS, 1):
        raise UsageError(f"--layout {given}: ep has to divide the {layout['dp']} data-parallel ranks")
    stated = replace(run, layout=dict(layout))
    mesh_of_run(stated)  # raises if the groups of the run contradict the layout
    return stated


def _stated_mesh(layout: Mapping[str, int], groups: Sequence[RankGroup], num_ranks: int) -> Mesh:
    """Return the mesh of a stated layout, in the first order of axes that fits all groups of the run.

    Raises:
        UsageError: there is no such order.
    """
    names = [name for name in MEGATRON_ORDER if layout.get(name, 1) > 1 and name != EXPERTS]
    several = [group.ranks for group in groups if len(group.ranks) > 1]
    across: frozenset[int] = frozenset()
    for order in permutations(names):
        mesh = _numbered(layout, order, num_ranks)
        across = next((ranks for ranks in several if not _lies_along(mesh, ranks)), frozenset())
        if not across:
            return mesh
    axes = ", ".join(f"{name}={layout[name]}" for name in names)
    raise UsageError(
        f"--layout {axes}: the group of ranks {first_few(sorted(across), 8)} does not follow any axis"
    )


def _numbered(layout: Mapping[str, int], order: Sequence[str], num_ranks: int) -> Mesh:
    """Assign numbers to ranks along the axes, the first varying fastest; experts divide replicas in order."""
    places: dict[int, dict[str, int]] = {rank: {} for rank in range(num_ranks)}
    stride = 1
    for name in order:
        for rank, place in places.items():
            place[name] = rank // stride % layout[name]
        stride *= layout[name]
    if layout.get(EXPERTS, 1) > 1:
        for place in places.values():
            place[EXPERTS] = place["dp"] % layout[EXPERTS]
    return _from_mesh(places, num_ranks, layout)._replace(source=STATED)


def _lies_along(mesh: Mesh, ranks: frozenset[int]) -> bool:
    """Return whether ranks are all ranks along some axes, or some of those along one."""
    along = _axes_between(mesh, ranks)
    return len(along) == 1 or _is_whole(mesh, along, ranks)


def _with_activations(run: Run, groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Mark groups on which forward passes sum as much as activations with `ACTIVATIONS`."""
    sums = sums_of_passes(run).filter(pl.col("bytes_in") >= MIN_ACTIVATION_BYTES)
    shares = sums.group_by("group_ranks").agg(
        share=pl.col("bytes_in").filter("is_forward").sum() / pl.col("bytes_in").sum()
    )
    shares = shares.filter(pl.col("share") >= MIN_ACTIVATIONS)
    used = {frozenset(members_of(text)) for text in shares["group_ranks"]}
    return [
        group._replace(ops=group.ops | {ACTIVATIONS}) if group.ranks in used else group for group in groups
    ]


def sums_of_passes(run: Run) -> pl.DataFrame:
    """Return the reductions of one rank: `step`, `group_ranks`, `bytes_in` (-1 unknown) and `is_forward`."""
    calls = run.table(COLLECTIVES).filter(pl.col("op").is_in(REDUCTIONS))
    spans = next(iter(run.part_by_part(SPANS, _OF_PASSES)), SPANS.empty().select(_OF_PASSES))
    spans = spans.filter(pl.col("rank") == pl.col("rank").first())
    rank = -1 if spans.is_empty() else spans["rank"][0]
    calls = calls.filter(pl.col("rank") == rank).join(
        spans.select(launch_span_id="span_id", called_ns="start_ns"), on="launch_span_id", how="left"
    )
    steps = run.table(STEPS).filter(pl.col("rank") == rank).select("step", step_ns="start_ns").sort("step_ns")
    moments = calls.select("group_ranks", "bytes_in", at=pl.coalesce("called_ns", "enqueued_ns")).sort("at")
    backward = spans.filter(is_backward()).select(at="start_ns").sort("at")
    in_step, first = (
        moment.join_asof(steps, left_on="at", right_on="step_ns") for moment in (moments, backward)
    )
    first = first.group_by("step").agg(backward_ns=pl.col("at").min())
    sums = in_step.join(first, on="step", how="left", nulls_equal=True)
    before = pl.col("at") < pl.col("backward_ns")
    is_forward = before.fill_null(False) if backward.height else pl.lit(kind_of(run).trains is False)
    return sums.select("step", "group_ranks", "bytes_in", is_forward=is_forward)


_OF_PASSES = ["span_id", "rank", "name", "start_ns", "forward_thread"]


@kept_as("axes-of-messages")
def axes_of_messages(graph: Graph) -> tuple[str, ...]:
    """Return the axis of each kind of communication, in the order of the graph's messages.

    A message between two ranks is along the axis in which these two differ, whatever group it is sent in.

    Returns:
        Axes as from `axis_of_group`; empty where calls differ in axis, and all empty without a run.
    """
    if graph.run is None:
        return ("",) * len(graph.messages)
    mesh = mesh_of_run(graph.run)
    columns = ["rank", "peer", "op", "group", "group_ranks"]
    calls = graph.run.table(COLLECTIVES, columns).with_columns(label=group_label())
    alone = calls.filter(pl.col("peer") < 0).select("op", "label", "group", ranks="group_ranks")
    pairs = calls.filter(pl.col("peer") >= 0).select(
        "op", "label", "group", ranks=pl.format("{},{}", "rank", "peer")
    )
    axes_of: dict[tuple[str, str], set[str]] = {}
    for op, label, group, ranks in pl.concat([alone, pairs]).unique().iter_rows():
        axis = axis_of_group(mesh, members_of(ranks), description_of(group))
        axes_of.setdefault((op, label), set()).add(axis)
    axes = {message: along.pop() for message, along in axes_of.items() if len(along) == 1}
    return tuple(axes.get((message.op, message.group), "") for message in graph.messages)


def description_of(group: str) -> str:
    """Return the job's description of a group, from its name in a run (`35 TENSOR_MODEL_PARALLEL_GROUP`)."""
    return group.partition(" ")[2]


def groups_of(run: Run) -> list[RankGroup]:
    """Return the process groups of a run in the order of their creation, where their names have numbers."""
    columns = ["group", "group_ranks"]
    said = run.table(PROCESS_GROUPS).select(*columns, op=pl.lit(""))
    calls = run.table(COLLECTIVES)
    used = calls.select(*columns, "op").unique()
    reductions = calls.filter(pl.col("op").is_in(REDUCTIONS)).join(
        run.table(BUCKETS).select("rank", bytes_in="bytes"), on=["rank", "bytes_in"], how="semi"
    )
    gradients = reductions.select(*columns, op=pl.lit(GRADIENTS)).unique()
    rows = pl.concat([said, used, gradients]).filter(pl.col("group_ranks") != "")
    used_for = rows.group_by(*columns).agg(pl.col("op").unique())
    groups = []
    for name, text, ops in used_for.iter_rows():
        ranks = members_of(text)
        number = whole_number(name.partition(" ")[0])
        order = (0, number) if number >= 0 else (1, 0)
        described = RankGroup(description_of(name), frozenset(ranks), frozenset(ops) - {""})
        groups.append(((*order, name, sorted(ranks)), described))
    return [group for _, group in sorted(groups, key=lambda entry: entry[0])]
