"""Variables of the environment, which the launcher has set.

In: `name` and `value`, and the `backend` that the variable is for, if it must be there. Out: nothing is done;
it is made sure that the process has them when it begins to train, since a launcher or the script may have put
its own in their place.
"""

from __future__ import annotations

import os
from typing import Any

from ..recorder import Recorder
from ..torch_internals import backend_configs
from .report import ChangeReport


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Look at the variable when the process begins to train."""

    def on_open() -> None:
        actual = os.environ.get(arguments["name"])
        wanted, backends = arguments.get("backend", ""), backend_configs()
        if wanted and not any(wanted in backend for backend in backends):
            used = ", ".join(backends) or "no process group"
            line = f"{arguments['name']}={arguments['value']}"
            report.refuse(f"the job has {used}: with {wanted}, set {line} in its environment")
            return
        if actual == arguments["value"]:
            report.applied("environment")
        else:
            report.refuse(f"the job sets {arguments['name']} itself" + (f" to {actual}" if actual else ""))

    recorder.listen("open", on_open)
