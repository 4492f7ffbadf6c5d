"""Recording in the workers of a Ray cluster, which get their environment from the nodes.

Takes the environment of a job without and with the recorder; returns variables that make `ray.init` in the
driver request the recorder's variables in every worker, through the runtime environment of the job, which Ray
(2.8 or newer) merges with the driver's own. Jobs without Ray ignore them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # description of the job from `ray job submit` for its driver
MERGE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"  # 1: the driver's value wins where both set one, without an error
PATH = "PYTHONPATH"
_OF_NODE = "${PYTHONPATH}"  # Ray replaces it by the node's value


def ray_variables(before: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to the environment of a job so that its Ray workers are recorded.

    Args:
        before: the environment without the recorder.
        recorded: the environment with the recorder.

    Returns:
        The variables; empty where something other than Ray has set them.
    """
    added = {name: value for name, value in recorded.items() if before.get(name) != value}
    try:
        job: dict[str, Any] = json.loads(before.get(JOB, "{}"))
        wanted = dict(job.get("runtime_env") or {})
        variables: dict[str, str] = dict(wanted.get("env_vars") or {})
    except (ValueError, TypeError, AttributeError):
        return {}
    ours = recorded[PATH].removesuffix(before.get(PATH, "")).removesuffix(os.pathsep)
    path = os.pathsep.join([ours, variables.get(PATH, _OF_NODE)])
    job["runtime_env"] = wanted | {"env_vars": added | variables | {PATH: path}}
    return {JOB: json.dumps(job), MERGE: "1"}
