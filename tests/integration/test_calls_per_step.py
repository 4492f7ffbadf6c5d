"""How many Python functions of ours a step of a recorded job calls, and what that costs it."""

from __future__ import annotations

import json
import statistics

import pytest

from dpro.analysis.recording import recording_share
from tests.jobs import COMPILER, record, script

pytest.importorskip("torch")

LIGHT, SAMPLED = 20, 60
JOB = """
import json
torch.set_num_threads(1)
calls, ours = [], f"{os.sep}inside{os.sep}"

def count(frame, event, _):
    code = frame.f_code
    if event == "call" and ours in code.co_filename:
        calls.append(code.co_name)

for _ in range(100):
    train_step()
steps = []
for _ in range(600):
    calls.clear()
    sys.setprofile(count)
    train_step()
    sys.setprofile(None)
    steps.append(list(calls))
print(json.dumps(steps))
"""
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


@pytest.mark.parametrize(
    "optimizer", ["", pytest.param(SGD, marks=pytest.mark.slow)], ids=["of the script", "of torch"]
)
def test_light_step_calls_twenty_functions_of_ours_at_most_and_one_with_samples_sixty(tmp_path, optimizer):
    job = script(tmp_path, optimizer + JOB, "os", *([COMPILER] if optimizer else []))
    _, done = record(tmp_path, job, "--every", "1000000", "--skip", "1000000")
    steps = json.loads(done.stdout)
    sampled = [step for step in steps if "on_sample" in step]
    light = [step for step in steps if not {"on_sample", "flush", "_look"} & set(step)]
    assert len(light) > 30
    assert len(sampled) > 30
    assert statistics.median(map(len, light)) <= LIGHT
    assert statistics.median(map(len, sampled)) <= SAMPLED


@pytest.mark.slow
def test_recording_costs_steps_of_twenty_milliseconds_less_than_its_budget(tmp_path):
    job = script(tmp_path, "for _ in range(600):\n    train_step()\n    time.sleep(0.02)\n", "time")
    run, _ = record(tmp_path, job)
    cost = recording_share(run.manifest)
    assert 0 < cost.at_ends < 0.005
    assert cost.share < cost.budget == 0.01
