"""What all tests share: the folder of real traces, and how hypothesis searches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dpro.store import Run

REPOSITORY = Path(__file__).resolve().parents[1]
COMPILED = REPOSITORY / "build" / "loops"

# No deadlines: a shared machine is slow at times. CI repeats the same examples on every run, and fewer:
# new ones are drawn wherever people work.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, max_examples=40)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Give workers the files in order: jobs of `tests/integration`, which wait, before work that never does.

    Else files of few tests come last. Those are the longest jobs, and one core idles while the last one ends.
    """
    config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `few(n)`, n cases run by default, spread over all; the others are slow."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault((str(item.path), item.originalname), []).append(item)  # type: ignore[attr-defined]
    for of_test in cases.values():
        (number,) = of_test[0].get_closest_marker("few").args  # type: ignore[union-attr]
        kept = {place * len(of_test) // number for place in range(number)}
        for place, item in enumerate(of_test):
            if place not in kept:
                item.add_marker("slow")


def _shared(factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests that all its workers have."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests try and keep, and processes that they start, goes into places of theirs, not the user's.

    All workers share one cache: a real trace is imported once, and its graph built once.
    """
    cache = _shared(tmp_path_factory) / "cache"
    _copied_code(COMPILED, cache / "loops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("DPRO_HISTORY", "off")  # what one test finds is no evidence in another
        patch.setenv("DPRO_CACHE", str(cache))
        patch.setattr("dpro.analysis.graphs.KEPT", 1000)  # a user has fewer runs
        yield
    _copied_code(cache / "loops", COMPILED)


def _copied_code(kept: Path, to: Path) -> None:
    """Copy the machine code of loops, which the tests that run later need not compile again."""
    to.mkdir(parents=True, exist_ok=True)
    for file in kept.glob("*.nb[ci]"):
        if not (to / file.name).exists():
            shutil.copy2(file, place := to / f".{file.name}.{os.getpid()}")
            place.rename(to / file.name)


@pytest.fixture(scope="session")
def make_cache() -> Callable[[Path], Path]:
    """Makes a cache without imports and graphs, but with machine code of loops, else compiled again."""

    def make(cache: Path) -> Path:
        _copied_code(Path(os.environ["DPRO_CACHE"]) / "loops", cache / "loops")
        return cache

    return make


@pytest.fixture
def empty_cache(make_cache: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such a cache, which commands and processes of the test have."""
    cache = make_cache(tmp_path / "cache")
    monkeypatch.setenv("DPRO_CACHE", str(cache))
    return cache


@pytest.fixture(scope="module")
def searched_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The search of what would help a run is made once: it is most of what many commands do."""
    from tests.searches import search_once

    with pytest.MonkeyPatch.context() as patch:
        search_once(patch, _shared(tmp_path_factory) / "searched")
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of real traces of other people's jobs; they are not part of the repository."""
    folder = Path(os.environ.get("DPRO_TRACES", REPOSITORY.parent / "shared" / "traces"))
    if not folder.is_dir():
        pytest.skip(f"no real traces in {folder} (DPRO_TRACES names another folder)")
    return folder


@pytest.fixture(scope="session")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A real run of a model of equal layers, recorded once; tests do not change it."""
    from tests.layers import recorded

    return recorded(tmp_path_factory.mktemp("layered"))
