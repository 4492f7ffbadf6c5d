"""What a driver of Ray is given, for its workers to be recorded."""

from __future__ import annotations

import json

import pytest

from dpro.collectors.launch.ray_jobs import JOB, MERGE, ray_variables

RECORDED = {"PYTHONPATH": "/inject:/inject/launch=x", "KINETO_LOG_LEVEL": "99", "HOME": "/h"}


def asked(before: dict[str, str], recorded: dict[str, str]) -> dict[str, object]:
    variables = ray_variables(before, recorded)
    assert variables[MERGE] == "1"
    job: dict[str, object] = json.loads(variables[JOB])
    return job


def test_workers_get_what_the_recorder_adds_before_the_search_path_of_their_node():
    variables = {"PYTHONPATH": "/inject:/inject/launch=x:${PYTHONPATH}", "KINETO_LOG_LEVEL": "99"}
    assert asked({"HOME": "/h"}, RECORDED) == {"runtime_env": {"env_vars": variables}}
    before = {"HOME": "/h", "PYTHONPATH": "/driver"}
    recorded = RECORDED | {"PYTHONPATH": "/inject:/inject/launch=x:/driver"}
    assert asked(before, recorded) == {"runtime_env": {"env_vars": variables}}


def test_what_a_submitted_job_asks_for_stays():
    of_job = {"PYTHONPATH": "/jobs", "KINETO_LOG_LEVEL": "1", "A": "b"}
    job = {"runtime_env": {"env_vars": of_job, "pip": ["x"]}, "metadata": {"id": "7"}}
    path = "/inject:/inject/launch=x:/jobs"
    expected = {"env_vars": of_job | {"PYTHONPATH": path}, "pip": ["x"]}
    assert asked({"HOME": "/h", JOB: json.dumps(job)}, RECORDED) == job | {"runtime_env": expected}


@pytest.mark.parametrize("job", ["{", "[]", "7", '{"runtime_env": 7}', '{"runtime_env": {"env_vars": [1]}}'])
def test_what_is_no_job_is_left_to_ray(job):
    assert ray_variables({JOB: job}, RECORDED | {JOB: job}) == {}
