import json

import pytest

from dpro.collectors.convert.tables import mesh_coordinates

TWO = {"names": ["dp", "tp"], "sizes": [2, 4], "coordinate": [1, 3]}
HYBRID = {"names": ["dp_replicate", "dp_shard", "TP"], "sizes": [2, 4, 2], "coordinate": [1, 3, 0]}


@pytest.mark.parametrize(
    ("meshes", "coordinates"),
    [
        ([TWO], {"dp": 1, "tp": 3, "dp_size": 2, "tp_size": 4}),
        ([HYBRID], {"dp": 7, "tp": 0, "dp_size": 8, "tp_size": 2}),  # axes of one kind are one
        ([{"names": ["x"], "sizes": [2], "coordinate": [1]}], {}),
        (
            [{"names": ["dp"], "sizes": [8], "coordinate": [7]}, TWO],
            {"dp": 1, "tp": 3, "dp_size": 2, "tp_size": 4},
        ),
        (
            [TWO, {"names": ["ep"], "sizes": [2], "coordinate": [1]}],
            {"dp": 1, "tp": 3, "ep": 1, "dp_size": 2, "tp_size": 4, "ep_size": 2},
        ),
    ],
)  # fmt: skip
def test_coordinates_follow_from_the_names_of_the_axes(tmp_path, meshes, coordinates):
    path = tmp_path / "mesh.json"
    path.write_text(json.dumps(meshes))
    assert mesh_coordinates(path) == coordinates


def test_job_without_a_mesh_has_no_coordinates(tmp_path):
    assert mesh_coordinates(tmp_path / "mesh.json") == {}
