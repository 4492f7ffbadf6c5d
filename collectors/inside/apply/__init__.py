"""Changes to the job that `dpro try` makes from the inside, family by family.

In: `apply` of the configuration: objects with the `edit` as the user wrote it, its `family` and the family's
`arguments`. Out: a changed job, and `applied.json`, one object per change: `edit`, `applied` (places:
`where`, `instead_of`, `times`) and `refused` (reasons). A change that was not made until the job is under way
is refused, too: a job that was not changed must not be measured as if it were. Loaded only where changes were
asked for.

`install` calls the function of each family in a process that begins to train, with

    report: whether and where this change was made; each family says so there, or why it refuses.
    recorder: of the process; it calls the family on steps and at the end.
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

from ..recorder import Recorder

FIRST = True  # of all probes: what a change costs belongs to the step that it is in
SETTLED_AT_STEP = 5  # every change that can be made has been made by then
# In this order changes are made to one and the same thing: what is compiled can be run under autocast.
FAMILIES = {  # with the function that makes them, and its module
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

_OURS = __name__.rpartition(".")[0]


class ChangeReport:
    """Whether and where one change was made.

    Attributes:
        missing: why it was not made, where it has not been.
    """

    def __init__(self, edit: str, save: Callable[[], None]) -> None:
        """Nothing is changed yet.

        Args:
            save: called whenever there is something new to say.
        """
        self.edit = edit
        self.missing = "the job never reached the code that the edit changes"
        self._save = save
        self.forget()

    def forget(self) -> None:
        """This is a forked child: what was changed was in the parent."""
        self._places: Counter[tuple[str, str]] = Counter()
        self._refused: list[str] = []

    def applied(self, where: str, instead_of: str = "") -> None:
        """Note that the change was made.

        Args:
            instead_of: what the script had asked for there, if it had.
        """
        self._places[where, instead_of] += 1
        self._save()

    def refuse(self, reason: str) -> None:
        """Note why the change cannot be made."""
        if reason not in self._refused:
            self._refused.append(reason)
            self._save()

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Run a part of the change; if that fails, the change is refused and the job goes on without it."""
        try:
            action(*arguments)
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {error}".replace("\n", " "))

    def settle(self) -> None:
        """Refuse the change if it was not made by now."""
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
    """Prepare all changes that were asked for."""
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
    """The function that makes changes of a family."""
    module, _, function = FAMILIES[name].rpartition(".")
    made: Callable[[ChangeReport, Recorder, dict[str, Any]], None] = getattr(
        import_module(f".{module}", __name__), function
    )
    return made


def place() -> str:
    """Where in the script, or in a library that it uses, torch is being called: `train.py:12`."""
    frame = sys._getframe(1)
    while frame is not None:
        module = f"{frame.f_globals.get('__name__', '')}."
        if not module.startswith((f"{_OURS}.", "torch.")):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
