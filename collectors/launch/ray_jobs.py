"""Getting the recorder into the workers of a Ray cluster, which have their environment from its nodes.

In: the environment of a job before and with the recorder. Out: variables that have `ray.init` in the job, the
driver, ask for what the recorder added in every worker: as the runtime environment of the job, which Ray (2.8
or newer) merges with that of the driver's own. Jobs without Ray do not look at them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # a job as `ray job submit` describes it to its driver
MERGE = "RAY_OVERRIDE_JOB_RUNTIME_ENV"  # of 1: what both set is as the driver has it, and not refused
PATH = "PYTHONPATH"
_OF_NODE = "${PYTHONPATH}"  # which Ray replaces by that of the node


def ray_variables(before: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a job, with the recorder in it, for workers to have it, too.

    Args:
        before: the environment without the recorder.
        recorded: the same with it.

    Returns:
        The variables; none where something else than Ray has set them.
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
