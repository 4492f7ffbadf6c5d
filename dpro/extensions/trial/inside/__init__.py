"""Changes that `dpro try` makes to the job from inside, family by family.

Reads `apply` of the configuration: objects with the `edit` as the user wrote it, its `family` and the
family's `arguments`. Changes the job, and writes `applied.json`, one object per change: `edit`, `applied`
(places: `where`, `instead_of`, `times`) and `refused` (reasons). A change that is still missing when the job
is under way is refused, too: an unchanged job must not be measured as a changed one. Loaded only where
changes were requested.

`install` calls the function of each family in a process that begins to train, with

    report: the record of where the family makes the change, or why it refuses.
    recorder: the process's recorder, which calls the family on steps and at the end.
    arguments: of the change, by name, as `dpro/extensions/trial/changes.py` makes them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from _dpro_inside_the_job.recorder import Recorder

FIRST = True  # installed before other probes: the cost of a change belongs to its step
SETTLED_AT_STEP = 5  # every change that can be made has been made by then
# Changes to one object are made in this order, so that a compiled model can run under autocast.
FAMILIES = {  # by family: the module and the function that makes its changes
    "probes.compress": "probes.measure_codecs",
    "probes.precision": "probes.measure_sensitivities",
    "environment": "host.check_variable",
    "host": "host.change_host",
    "data": "arguments.change_loaders",
    "repeat": "waits.return_batches_again",
    "waits": "waits.return_values_late",
    "optimizers": "arguments.change_optimizers",
    "accumulate": "accumulate.install",
    "ddp": "arguments.change_ddp",
    "reduction": "reduction.install",
    "tensors": "tensors.install",
    "modules.sharded": "modules.prefetch",
    "modules.recompute": "modules.recompute",
    "modules.compiling": "modules.compile_model",
    "modules.precision": "modules.lower_precision",
}

_NOT_OF_THE_JOB = (f"{__name__}.", "_dpro_inside_the_job.", "torch.")


class ChangeReport:
    """The record of whether and where one change was made.

    Attributes:
        missing: the reason for refusing a change that has not been made.
    """

    def __init__(self, edit: str, save: Callable[[], None]) -> None:
        """Start without places and refusals.

        Args:
            save: called after each change of the report.
        """
        self.edit = edit
        self.missing = "the job never reached the code that the edit changes"
        self._save = save
        self.forget()

    def forget(self) -> None:
        """Clear places and refusals in a forked child: they belong to its parent."""
        self._places: Counter[tuple[str, str]] = Counter()
        self._refused: list[str] = []

    def applied(self, where: str, instead_of: str = "") -> None:
        """Record that the change was made.

        Args:
            instead_of: what the script had asked for there; empty for nothing.
        """
        self._places[where, instead_of] += 1
        self._save()

    def refuse(self, reason: str) -> None:
        """Record why the change cannot be made."""
        if reason not in self._refused:
            self._refused.append(reason)
            self._save()

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Run a part of the change; if it raises, refuse the change and let the job continue without it."""
        try:
            action(*arguments)
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {error}".replace("\n", " "))

    def settle(self) -> None:
        """Refuse the change unless it was made or refused before."""
        if not self._places and not self._refused:
            self.refuse(self.missing)

    def facts(self) -> dict[str, Any]:
        """Return the change's object of `applied.json`."""
        places = [
            {"where": where, "instead_of": instead_of, "times": times}
            for (where, instead_of), times in self._places.items()
        ]
        return {"edit": self.edit, "applied": places, "refused": self._refused}


def install(recorder: Recorder) -> None:
    """Prepare all requested changes."""
    reports: list[ChangeReport] = []

    def save() -> None:
        if recorder.folder is not None:
            content = json.dumps([report.facts() for report in reports])
            recorder.write_file("applied.json", content.encode())

    def settle(step: int = SETTLED_AT_STEP) -> None:
        if step >= SETTLED_AT_STEP:
            for report in reports:
                report.settle()

    def forget() -> None:
        for report in reports:
            report.forget()

    asked = sorted(recorder.config["apply"], key=lambda change: [*FAMILIES].index(change["family"]))
    for change in asked:
        report = ChangeReport(change["edit"], save)
        reports.append(report)
        report.attempt(_install, change, report, recorder)
    for occasion, action in (("open", save), ("step", settle), ("end", settle), ("fork", forget)):
        recorder.listen(occasion, action)


def _install(change: dict[str, Any], report: ChangeReport, recorder: Recorder) -> None:
    family_of(change["family"])(report, recorder, change["arguments"])


def family_of(name: str) -> Callable[[ChangeReport, Recorder, dict[str, Any]], None]:
    """Return the function that makes the changes of a family."""
    module, _, function = FAMILIES[name].rpartition(".")
    made: Callable[[ChangeReport, Recorder, dict[str, Any]], None] = getattr(
        import_module(f".{module}", __name__), function
    )
    return made


def place() -> str:
    """Return the innermost call outside torch and the recorder, as `train.py:12`; `?` where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if not module.startswith(_NOT_OF_THE_JOB):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
