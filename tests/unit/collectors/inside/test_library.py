"""The recorder goes on with the standard library as it was when the job has replaced functions of it."""

from __future__ import annotations

import json
import os
import sys
import time
from types import ModuleType

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside import patching


def test_functions_that_the_job_replaces_are_not_called_by_modules_of_the_recorder(monkeypatch):
    ours, other = ModuleType(f"{patching.__package__}.made_up"), ModuleType("of_the_job")
    for module in (ours, other):
        vars(module).update(time=time, os=os, json=json, sys=sys)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "modules", {name: sys.modules[name] for name in (ours.__name__, other.__name__)})
    patching.keep_library()
    replaced = {time: "time_ns", os: "open", os.path: "abspath", json: "dumps"}
    for module, name in replaced.items():
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a function of the job's was called"))
    monkeypatch.setattr("builtins.open", lambda *_: pytest.fail("a function of the job's was called"))
    assert ours.time.time_ns() > 0
    assert ours.os.path.abspath("/a/../b") == "/b"
    assert ours.json.dumps({}) == "{}"
    os.close(ours.os.open("/dev/null", os.O_RDONLY))
    ours.open("/dev/null").close()
    assert (ours.sys, other.time, other.json) == (sys, time, json)
    assert not hasattr(other, "open")
