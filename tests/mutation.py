"""Mutation testing: do the tests notice a small change to the code that everything else rests on?

In: the modules of `[tool.mutation]` in `pyproject.toml`, each with the tests that have to notice. Out: how
many of the mutants of a sample were killed, and each survivor as a diff, in `build/mutation/survivors.txt`.
The tree is copied there first: mutants never touch the checkout. Cosmic Ray makes the mutants: it works on
source files, so that compiled loops are mutated, too. Annotations are never evaluated and decorators only
compile: neither is mutated.

    python -m tests.mutation --sample 60 --seed 0 --only match

With `--draw N` there are N mutants of product code instead, drawn at random over its modules. The tests that
have to notice are those that import the module, then those of its package.

    python -m tests.mutation --draw 36 --seed 7
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TextIO

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutation"
MAX_TIMES = 10.0  # what the unchanged tests take: a mutant that takes longer loops, and counts as killed
MAX_BYTES = 8 << 30  # of address space, for mutants whose loops fill memory
MAX_S = 900.0  # what the tests of a drawn mutant may take
PRODUCT = (
    "replay",
    "dpro/detect",
    "dpro/verdict",
    "dpro/analysis",
    "collectors",
)  # from which mutants are drawn
PYTEST = "-m pytest -x -q -p no:cacheprovider -p no:xdist --hypothesis-seed=0"


def main() -> None:
    """Run the mutants that were asked for, and print the score of each module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module; 0 is all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    parser.add_argument("--draw", type=int, default=0, help="instead, mutants of any product module")
    asked = parser.parse_args()
    copy_tree()
    os.chdir(COPY)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    with open(COPY / "survivors.txt", "w", encoding="utf-8") as survivors:
        if asked.draw:
            run_drawn(asked.draw, asked.seed, asked.only, survivors)
            return
        for module, tests in targets().items():
            if asked.only in module:
                run(Path(module), tests, asked.sample, asked.seed, survivors)


def targets() -> dict[str, str]:
    """Return the modules to mutate, each with its tests as pytest takes them."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        found: dict[str, str] = tomllib.load(file)["tool"]["mutation"]
    return found


def copy_tree() -> None:
    """Copy what git knows or would add, links as links."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if not (ROOT / name).exists() and not (ROOT / name).is_symlink():
            continue  # deleted, and not yet committed
        (COPY / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, COPY / name, follow_symlinks=False)


def run(module: Path, tests: str, sample: int, seed: int, survivors: TextIO) -> None:
    """Test the mutants of one module, and print how many were killed.

    Args:
        module: relative to the copy, which is the working directory.
        tests: what has to notice, as pytest takes it.
        sample: how many mutants to draw; 0 is all.
        seed: of the draw.
        survivors: receives the diff of each mutant that survived.
    """
    command = f"{shlex.quote(sys.executable)} {PYTEST} {tests}"
    begun = time.monotonic()
    subprocess.run(shlex.split(command), check=True, stdout=subprocess.DEVNULL)  # unchanged, they pass
    timeout_s = MAX_TIMES * (time.monotonic() - begun)
    mutants = list(mutants_of(module))
    chosen = random.Random(seed).sample(mutants, sample) if 0 < sample < len(mutants) else mutants
    begun, survived = time.monotonic(), 0
    for done, mutant in enumerate(chosen, 1):
        result = mutate_and_test([mutant], command, timeout_s)
        if result.test_outcome == TestOutcome.SURVIVED:
            survived += 1
            survivors.write(f"{module}:{mutant.start_pos[0]} {mutant.operator_name}\n{result.diff}\n\n")
            survivors.flush()
        print(f"\r{module}: {done}/{len(chosen)}, {survived} survived", end="", file=sys.stderr, flush=True)
    killed, took = len(chosen) - survived, time.monotonic() - begun
    print(
        f"\r{module}: {killed} of {len(chosen)} killed, of {len(mutants)} that there are; {took / 60:.0f} min"
    )


def run_drawn(count: int, seed: int, only: str, survivors: TextIO) -> None:
    """Test mutants of any product modules, and print which test noticed each, if any did.

    Args:
        count: how many mutants.
        seed: of the draw.
        only: part of the paths of modules that are drawn from.
        survivors: receives the diff of each mutant that survived.
    """
    killed = 0
    for done, (module, mutant) in enumerate(islice(draw(seed, only), count), 1):
        begun, noticed = time.monotonic(), ""
        for tests in filter(None, (tests_importing(module), tests_of_package(module))):
            names = " ".join(shlex.quote(str(path)) for path in tests)
            command = f"{shlex.quote(sys.executable)} {PYTEST} -m 'not slow' {names}"
            result = mutate_and_test([mutant], command, MAX_S)
            if result.test_outcome != TestOutcome.SURVIVED:
                named = re.search(r"^(?:FAILED|ERROR) (\S+)", result.output or "", re.MULTILINE)
                noticed = named[1] if named else str(result.output).strip().splitlines()[-1:][0]
                break
        killed += bool(noticed)
        where = f"{module}:{mutant.start_pos[0]} {mutant.operator_name}"
        took_s = time.monotonic() - begun
        print(f"{done}: {where}: {noticed or 'survived'} ({took_s:.0f} s)", flush=True)
        if not noticed:
            survivors.write(f"{where}\n{result.diff}\n\n")
            survivors.flush()
    print(f"{killed} of {count} killed")


def draw(seed: int, only: str) -> Iterator[tuple[Path, MutationSpec]]:
    """Yield mutants of product modules: a module as often as it has lines, each place in it equally often."""
    modules = [path for folder in PRODUCT for path in sorted(Path(folder).rglob("*.py")) if only in str(path)]
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in modules]
    chance = random.Random(seed)
    while True:
        (module,) = chance.choices(modules, lines)
        constants = lines_of_constants(module)
        places: dict[tuple[int, int], list[MutationSpec]] = {}
        for mutant in mutants_of(module):
            if mutant.start_pos[0] not in constants and "Exception" not in mutant.operator_name:
                places.setdefault(mutant.start_pos, []).append(mutant)
        if places:
            yield module, chance.choice(places[chance.choice(sorted(places))])


def lines_of_constants(module: Path) -> set[int]:
    """Return the lines at which a module sets its constants: thresholds may be a little off."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    constants = [node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return {line for node in constants for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def tests_importing(module: Path) -> list[Path]:
    """Return the files of unit tests that import a module, those named like it first."""
    name = ".".join(module.with_suffix("").parts).removeprefix("dpro.").removesuffix(".__init__")
    package, _, last = f"dpro.{name}".rpartition(".")
    imports = re.compile(
        rf"^\s*(?:from dpro\.{name} import|import dpro\.{name}\b|from {package} import .*\b{last}\b)", re.M
    )
    tests = [
        path for path in sorted(Path("tests/unit").rglob("test_*.py")) if imports.search(path.read_text())
    ]
    return sorted(tests, key=lambda path: (path.stem != f"test_{last}", path))


def tests_of_package(module: Path) -> list[Path]:
    """Return the unit tests of a module's package, or of the nearest one around it that has any."""
    parts = module.parts[1:-1] if module.parts[0] == "dpro" else module.parts[:-1]
    folders = [Path("tests/unit", *parts[:count]) for count in range(len(parts), 0, -1)]
    return next((tests for folder in folders if (tests := sorted(folder.glob("test_*.py")))), [])


def mutants_of(module: Path) -> Iterator[MutationSpec]:
    """Yield the changes to a module that its tests can notice."""
    annotations = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for each in ast.walk(ast.parse(module.read_text()))
        for node in (getattr(each, "annotation", None), getattr(each, "returns", None))
        if isinstance(node, ast.expr)
    ]
    for item in _all_work_items([module], {}):
        (spec,) = item.mutations
        if "Decorator" not in spec.operator_name and not any(
            begin <= spec.start_pos < end for begin, end in annotations
        ):
            yield spec


if __name__ == "__main__":
    main()
