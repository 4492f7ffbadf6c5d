"""Discovery of extensions by their entry points, and access to what they add to dpro.

An extension is a package with an `EXTENSION` that an entry point of the group `dpro.extensions` names:

    [project.entry-points."dpro.extensions"]
    sparks = "dpro_sparks:EXTENSION"

dpro's own extensions, in `dpro/extensions/`, are found in the same way. The core imports none of them: this
module gives it the contributions of one kind, by name, as text `module:attribute`, to load when needed.
So a declaration costs no import, and the core works without any extension.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from dpro.errors import DproError, first_line

GROUP = "dpro.extensions"


class Command(NamedTuple):
    """The declaration of a command, so that it can be listed without being loaded.

    Attributes:
        place: the click command, as `module:attribute`.
        help: one line for `dpro --help`.
        section: section of that page.
        paged: whether an answer longer than the terminal goes through a pager; only for commands that print
            their answer at once.
    """

    place: str
    help: str
    section: str
    paged: bool = False


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an extension adds. All values except those of commands are places, as `module:attribute`.

    Attributes:
        commands: commands by name.
        options: options added to other commands, by command: a list of `click.Option`. The hooks of
            that command get their values by name.
        edits: subclasses of `dpro.replay.whatif.edit.Edit`, by family and name.
        changes: changes that are predicted without a graph, by the command that predicts them: a mapping of
            names to `dpro.replay.whatif.grammar.KnownChange`.
        detectors: `dpro.detect.run.Detector`s by name.
        importers: importers of traces by name: a `dpro.ingest.formats.Importer`, or its class, tried in the
            order of `dpro.ingest.formats.FormatEvidence`.
        classes: classes of kernels by name: a list of entries with `pattern`, `kind` and `op`, tried before
            dpro's own.
        views: `dpro.dashboards.page.View`s of the dashboard, by name.
        figures: figures of `run.plot` by name: functions of a `dpro.dashboards.loaded.Loaded` and a link.
        telemetry: `dpro.collectors.telemetry.gpus.GpuLibrary`s by name, to sample the GPUs of a vendor.
        probes: modules that are imported inside recorded jobs, by name; values are modules, without a colon.
        hooks: functions that the core calls, by occasion; `docs/extensions.md` lists the occasions.
        needs: names of other extensions that this one requires; without them it is not offered.
    """

    commands: Mapping[str, Command] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    edits: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    changes: Mapping[str, str] = field(default_factory=dict)
    detectors: Mapping[str, str] = field(default_factory=dict)
    importers: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    telemetry: Mapping[str, str] = field(default_factory=dict)
    probes: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


class Installed(NamedTuple):
    """Usable extensions by name, and one line for each broken one."""

    extensions: Mapping[str, Extension]
    complaints: tuple[str, ...]


@cache
def installed() -> Installed:
    """Find all extensions; a broken one becomes a complaint instead of an error."""
    usable: dict[str, Extension] = {}
    complaints = []
    for entry in entries():
        try:
            extension = load(entry.place)
            wrong = "" if isinstance(extension, Extension) else "it is not a dpro.plugins.Extension"
        except Exception as error:  # another distribution's code may raise anything
            wrong = f"{type(error).__name__}: {first_line(error)}"
        if entry.name in usable:
            wrong = "there is another of that name"
        if wrong:
            complaints.append(f"extension {entry.name} ({entry.place}) cannot be used: {wrong}")
        else:
            usable[entry.name] = extension
    while lacking := [name for name, extension in usable.items() if set(extension.needs) - usable.keys()]:
        for name in lacking:
            del usable[name]
    return Installed(usable, tuple(complaints))


def commands() -> dict[str, Command]:
    """Return the commands of all extensions, by name."""
    return _merged_field("commands")


def places(kind: str) -> dict[str, str]:
    """Return the contributions of all extensions of one kind, by name, as `module:attribute`.

    Args:
        kind: a field of `Extension` whose values are places, such as `views`.
    """
    return _merged_field(kind)


def _merged_field(kind: str) -> dict[str, Any]:
    """Return the entries of one field of all extensions, merged."""
    return {
        name: value
        for extension in installed().extensions.values()
        for name, value in getattr(extension, kind).items()
    }


def options_of(command: str) -> list[Any]:
    """Return the click options that extensions add to a command of the core."""
    return [option for options in _load_each("options", command) for option in options]


def hooks_of(occasion: str) -> Iterator[Any]:
    """Yield the extensions' hooks for an occasion, in the order of the extensions' names."""
    return _load_each("hooks", occasion)


def _load_each(kind: str, name: str) -> Iterator[Any]:
    """Load and yield each extension's contribution of one kind and name.

    Raises:
        DproError: a contribution of another distribution cannot be loaded.
    """
    for extension, declared in installed().extensions.items():
        place = getattr(declared, kind).get(name)
        if place is None:
            continue
        try:
            value = load(place)
        except Exception as error:  # another distribution's code may raise anything
            if place.startswith("dpro."):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
            raise DproError(f"extension {extension} ({place}) cannot be loaded: {why}") from error
        yield value


def extended(occasion: str, value: Any, *others: Any) -> Any:
    """Pass a value through the extensions' hooks for an occasion, one after the other."""
    for hook in hooks_of(occasion):
        value = hook(value, *others)
    return value


def code_of(kind: str) -> list[Path]:
    """Return the modules of all extensions that have contributions of one kind, such as `edits`."""
    packages = {entry.name: entry.place.partition(":")[0] for entry in reversed(entries())}
    files: list[Path] = []
    for name, extension in installed().extensions.items():
        if getattr(extension, kind):
            file = Path(sys.modules[packages[name]].__file__ or "")
            files += sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    return files


def load(place: str) -> Any:
    """Import and return the object at a place, given as `module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


class Entry(NamedTuple):
    """The entry point of an extension: its name, and the place of its `EXTENSION`."""

    name: str
    place: str


def entries() -> list[Entry]:
    """Return the entry points of all extensions, sorted by name; the first copy of a distribution counts.

    Reads the files that installers write, since importing `importlib.metadata` takes longer than
    `dpro --help` does.
    """
    by_distribution: dict[str, list[Entry]] = {}
    for folder in filter(os.path.isdir, dict.fromkeys(sys.path)):
        for name in os.listdir(folder):
            if name.endswith(".dist-info"):
                file = os.path.join(folder, name, "entry_points.txt")
                by_distribution.setdefault(name.partition("-")[0].lower(), _read_entries(file))
    if not by_distribution.get(DISTRIBUTION):
        by_distribution[DISTRIBUTION] = _entries_of_checkout()
    return sorted(chain.from_iterable(by_distribution.values()))


def _read_entries(file: str) -> list[Entry]:
    """Return the entry points of the group in one file; none if it cannot be read."""
    try:
        with open(file, encoding="utf-8") as lines:
            text = lines.read()
    except (OSError, UnicodeDecodeError):
        return []
    _, _, behind = f"\n{text}".partition(f"\n[{GROUP}]\n")
    pairs = (line.partition("=") for line in behind.partition("\n[")[0].splitlines())
    return [Entry(name.strip(), place.strip()) for name, equals, place in pairs if equals]


DISTRIBUTION = "dpro_toolkit"  # as installers write it


def _entries_of_checkout() -> list[Entry]:
    """Return dpro's own entry points from pyproject.toml, for a checkout that is not installed."""
    import tomllib

    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if not project.is_file():
        return []
    declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"][GROUP]
    return [Entry(name, place) for name, place in declared.items()]
