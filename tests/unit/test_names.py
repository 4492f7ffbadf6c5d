"""A class name stands for one thing: no two modules define public classes of the same name."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.sources import ROOT, modules

PACKAGES = ("collectors", "dashboards", "dpro", "replay", "sample_traces")


def test_each_public_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules(*PACKAGES):
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 300
    assert not {name: found for name, found in places.items() if len(found) > 1}
