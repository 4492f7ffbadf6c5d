import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.mesh import (
    Axis,
    Mesh,
    Overlay,
    RankGroup,
    axis_of_group,
    mesh_in_words,
    mesh_of,
    named_axes,
    places_along,
)

MEGATRON = {
    "dp": "DATA_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "cp": "CONTEXT_PARALLEL_GROUP",
}


def grid(sizes, numbers=None):
    """Coordinates of each rank, the first axis the slowest; `numbers` renumbers the ranks."""
    places = list(itertools.product(*(range(size) for size in sizes)))
    numbers = range(len(places)) if numbers is None else numbers
    return dict(zip(numbers, places))


def groups_along(places, axis, description="", ops=()):
    along = {}
    for rank, place in places.items():
        along.setdefault((*place[:axis], *place[axis + 1 :]), set()).add(rank)
    return [RankGroup(description, frozenset(ranks), frozenset(ops)) for ranks in along.values()]


def test_megatrons_descriptions_name_the_axes_of_64_ranks():
    places = grid((4, 8, 2))  # Megatron's order: tp fastest, then dp, then pp
    named = zip(("pp", "dp", "tp"), range(3))
    groups = [each for name, axis in named for each in groups_along(places, axis, MEGATRON[name])]
    groups.append(RankGroup("default_pg", frozenset(range(64))))
    mesh = mesh_of(groups, {}, 64)
    assert mesh_in_words(mesh) == "64 ranks = dp 8 x pp 4 x tp 2"
    assert (mesh.source, mesh.ambiguity) == ("descriptions", ())
    assert mesh.coordinates[0] == (0, 0, 0)
    assert mesh.coordinates[1] == (0, 0, 1)
    assert mesh.coordinates[2] == (1, 0, 0)
    assert mesh.coordinates[16] == (0, 1, 0)
    assert mesh.coordinates[63] == (7, 3, 1)


def test_context_parallelism_inside_of_data_parallelism_is_an_axis_of_its_own():
    places = grid((2, 2, 2))  # dp, cp, tp
    groups = [RankGroup("DATA_PARALLEL_GROUP_WITH_CP", frozenset({t, t + 2, t + 4, t + 6})) for t in range(2)]
    for axis, name in enumerate(("dp", "cp", "tp")):
        groups += groups_along(places, axis, MEGATRON[name])
    assert mesh_in_words(mesh_of(groups, {}, 8)) == "8 ranks = dp 2 x cp 2 x tp 2"


def test_experts_are_laid_over_the_ranks_of_data_parallelism():
    groups = groups_along(grid((8, 2)), 0, MEGATRON["dp"]) + groups_along(grid((8, 2)), 1, MEGATRON["pp"])
    experts = grid((2, 4, 2))
    groups += groups_along(experts, 1, "EXPERT_MODEL_PARALLEL_GROUP")
    groups += groups_along(experts, 0, "EXPERT_DATA_PARALLEL_GROUP")
    mesh = mesh_of(groups, {}, 16)
    assert mesh_in_words(mesh) == "16 ranks = dp 8 x pp 2, ep 4 over dp"
    assert axis_of_group(mesh, range(0, 16, 2), "DATA_PARALLEL_GROUP") == "dp"
    assert axis_of_group(mesh, {0, 2, 4, 6}, "EXPERT_MODEL_PARALLEL_GROUP") == "ep"
    assert axis_of_group(mesh, {0, 2, 4, 6}) == "ep"
    assert axis_of_group(mesh, {0, 8}, "EXPERT_DATA_PARALLEL_GROUP") == "dp"
    assert axis_of_group(mesh, {0, 1}) == "pp"


def test_experts_over_all_of_an_axis_are_known_by_their_description():
    places = grid((4, 2))
    groups = groups_along(places, 0, "EXPERT_MODEL_PARALLEL_GROUP")
    groups += groups_along(places, 0, MEGATRON["dp"]) + groups_along(places, 1, MEGATRON["tp"])
    mesh = mesh_of(groups, {}, 8)
    assert mesh_in_words(mesh) == "8 ranks = dp 4 x tp 2, ep 4 over dp"
    assert axis_of_group(mesh, {0, 2, 4, 6}, MEGATRON["dp"]) == "dp"
    assert axis_of_group(mesh, {0, 2, 4, 6}, "EXPERT_MODEL_PARALLEL_GROUP") == "ep"


@pytest.mark.parametrize(("expert", "group"), [(lambda dp: dp % 2, {0, 2}), (lambda dp: dp // 2, {0, 4})])
def test_coordinates_of_experts_beside_those_of_a_grid_are_laid_over_it(expert, group):
    recorded = {rank: {"dp": dp, "tp": tp, "ep": expert(dp)} for rank, (dp, tp) in grid((4, 2)).items()}
    mesh = mesh_of([], recorded, 8)
    assert mesh_in_words(mesh) == "8 ranks = dp 4 x tp 2, ep 2 over dp"
    assert mesh.ambiguity == ()
    assert axis_of_group(mesh, group) == "ep"
    assert axis_of_group(mesh, {0, 2, 4, 6}) == "dp"


def test_the_axis_of_a_group_is_where_its_ranks_differ():
    recorded = {rank: {"dp": dp, "cp": cp, "tp": tp} for rank, (dp, cp, tp) in grid((2, 2, 2)).items()}
    mesh = mesh_of([], recorded, 8)
    assert axis_of_group(mesh, {0, 1}) == "tp"
    assert axis_of_group(mesh, {0, 2, 4, 6}, "DATA_PARALLEL_GROUP_WITH_CP") == "dp x cp"
    assert axis_of_group(mesh, {3}) == ""
    assert axis_of_group(mesh, {0, 9}) == ""


def test_ranks_are_placed_along_axes_that_have_a_name_and_along_experts_in_the_order_of_their_groups():
    experts = Overlay("ep", 2, ("dp",), frozenset({frozenset({0, 2}), frozenset({1, 3})}))
    places = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, -1)}
    mesh = Mesh(5, (Axis("dp", 2), Axis("", 2)), places, "mesh", overlays=(experts,))
    assert named_axes(mesh) == ("dp", "ep")
    assert places_along(mesh, "dp") == {0: 0, 1: 0, 2: 1, 3: 1}
    assert places_along(mesh, "ep") == {0: 0, 2: 1, 1: 0, 3: 1}
    assert places_along(mesh, "tp") == {}
    tensor = Mesh(4, (Axis("dp", 2), Axis("tp", 2)), places, "mesh")
    assert places_along(tensor, "tp") == {0: 0, 1: 1, 2: 0}


def test_a_group_along_an_axis_without_a_name_has_none():
    mesh = mesh_of(groups_along(grid((4, 2)), 1, MEGATRON["tp"]), {}, 8)
    assert axis_of_group(mesh, {0, 1}) == "tp"
    assert axis_of_group(mesh, {0, 2}) == axis_of_group(mesh, {0, 3}) == ""


def test_coordinates_of_a_device_mesh_come_before_groups():
    recorded = {rank: {"dp": dp, "tp": tp} for rank, (dp, tp) in grid((2, 2)).items()}
    mesh = mesh_of([RankGroup("", frozenset(range(4)))], recorded, 4)
    assert mesh_in_words(mesh) == "4 ranks = dp 2 x tp 2"
    assert mesh.coordinates == {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
    assert (mesh.source, mesh.ambiguity) == ("mesh", ())


def test_axes_of_a_mesh_that_hold_too_few_ranks_are_said():
    mesh = mesh_of([], {0: {"tp": 0}, 1: {"tp": 1}}, 4)
    assert mesh.ambiguity == ("The recorded axes have 2 of 4 ranks.",)


def test_axes_are_as_long_as_meshes_say_where_ranks_are_missing():
    recorded = {0: {"dp": 0, "tp": 0}, 9: {"dp": 1, "tp": 1}}
    mesh = mesh_of([], recorded, 16, {"dp": 2, "tp": 8, "pp": -1})
    assert mesh_in_words(mesh) == "16 ranks = dp 2 x tp 8"
    assert mesh.ambiguity == ()
    # Of both orders of the axes only one gives rank 9 its place, and so those of all others.
    assert mesh.coordinates == {rank: (rank // 8, rank % 8) for rank in range(16)}


def test_places_of_missing_ranks_stay_open_where_several_orders_of_axes_fit():
    mesh = mesh_of([], {0: {"dp": 0, "tp": 0}}, 16, {"dp": 2, "tp": 8})
    assert mesh.coordinates == {0: (0, 0)}
    many = mesh_of([], {0: {"dp": 0}, 9: {"dp": 9}}, 10**12, {"dp": 10**12})
    assert set(many.coordinates) == {0, 9}  # more than there are ranks anywhere
    other = mesh_of([], {0: {"dp": 0, "tp": 0}, 9: {"dp": 1, "tp": 7}}, 16, {"dp": 2, "tp": 8})
    assert set(other.coordinates) == {0, 9}  # ranks are numbered in no order of the axes


def test_groups_that_only_exchange_messages_are_a_pipeline():
    places = grid((2, 3))
    groups = groups_along(places, 0, "", {"send", "recv"}) + groups_along(places, 1, "", {"all_reduce"})
    mesh = mesh_of(groups, {}, 6)
    assert set(mesh.axes) == {Axis("pp", 2), Axis("", 3)}
    assert mesh.source == "algebra"
    assert any("all_reduce, has no name: its kind is unknown" in each for each in mesh.ambiguity)


def test_two_axes_of_equal_size_and_use_stay_ambiguous():
    places = grid((2, 2))
    groups = [each for axis in range(2) for each in groups_along(places, axis, "", {"all_reduce"})]
    mesh = mesh_of(groups, {}, 4)
    assert mesh_in_words(mesh) == "4 ranks = axis of 2 x axis of 2"
    assert (
        "Unnamed axes of the same size can be distinguished only by the ranks of their groups."
        in mesh.ambiguity
    )


def test_an_axis_that_no_group_shows_is_said():
    mesh = mesh_of(groups_along(grid((4, 2)), 1, MEGATRON["tp"]), {}, 8)
    assert mesh_in_words(mesh) == "8 ranks = tp 2 x axis of 4"
    assert mesh.coordinates[5] == (1, 2)
    assert mesh.ambiguity == ("No group shows the axis of size 4: ranks are taken in order.",)


def test_a_job_of_unknown_size_has_no_layout():
    assert mesh_in_words(mesh_of([RankGroup(MEGATRON["tp"], frozenset({0, 1}))], {}, 0)) == ""


@pytest.mark.parametrize("groups", [[], [RankGroup("", frozenset({0, 1}))]])
def test_no_layout_is_named_where_groups_leave_ranks_out(groups):
    mesh = mesh_of(groups, {}, 4)
    assert (mesh_in_words(mesh), mesh.coordinates, mesh.source) == ("", {}, "")


SIZES = st.lists(st.integers(2, 4), min_size=1, max_size=3)


@given(sizes=SIZES, order=st.randoms())
def test_ranks_numbered_along_the_axes_get_their_coordinates_back(sizes, order):
    places = grid(sizes)
    groups = [each for axis in range(len(sizes)) for each in groups_along(places, axis)]
    order.shuffle(groups)
    assert_same_up_to_names(mesh_of(groups, {}, math.prod(sizes)), places, sizes)


@given(sizes=SIZES, seed=st.integers(0, 1000))
def test_ranks_numbered_in_any_order_get_theirs_from_described_groups(sizes, seed):
    numbers = list(range(math.prod(sizes)))
    random.Random(seed).shuffle(numbers)
    places = grid(sizes, numbers)
    names = ("dp", "pp", "tp")
    groups = [
        each for axis in range(len(sizes)) for each in groups_along(places, axis, MEGATRON[names[axis]])
    ]
    random.Random(seed).shuffle(groups)
    assert_same_up_to_names(mesh_of(groups, {}, len(numbers)), places, sizes)


def assert_same_up_to_names(mesh, places, sizes):
    """Each axis parts the ranks as one of the true axes does."""

    def parts(coordinates, axis):
        return frozenset(
            frozenset(rank for rank, place in coordinates.items() if place[axis] == at)
            for at in {place[axis] for place in coordinates.values()}
        )

    found = {parts(mesh.coordinates, axis) for axis in range(len(mesh.axes))}
    assert found == {parts(places, axis) for axis in range(len(sizes))}
