"""Mutation testing: do the tests notice a small change to the code that everything else rests on?

In: the modules of `[tool.mutation]` in `pyproject.toml`, each with the tests that have to notice. Out: how
many of the mutants of a sample were killed, and each survivor as a diff, in `build/mutation/survivors.txt`.
The tree is copied there first: mutants never touch the checkout. Cosmic Ray makes the mutants: it works on
source files, so that compiled loops are mutated, too. Annotations are never evaluated and decorators only
compile: neither is mutated.

    python -m tests.mutation --sample 60 --seed 0 --only match
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "mutation"
MAX_TIMES = 10.0  # what the unchanged tests take: a mutant that takes longer loops, and counts as killed
MAX_BYTES = 8 << 30  # of address space, for mutants whose loops fill memory
PYTEST = "-m pytest -x -q -p no:cacheprovider -p no:xdist --hypothesis-seed=0"


def main() -> None:
    """Run the mutants that were asked for, and print the score of each module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sample", type=int, default=0, help="mutants of each module; 0 is all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="modules whose path contains this")
    asked = parser.parse_args()
    copy_tree()
    os.chdir(COPY)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    with open(COPY / "survivors.txt", "w", encoding="utf-8") as survivors:
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
