"""Loops over arrays as machine code, which numba makes when they are first called and keeps on disk.

In: functions over flat arrays. Out: the same, compiled. What numba keeps are pickles, which may run anything:
they lie in a folder of the user's own cache to which no one else may write, or where there is none nothing is
kept. They are found by what determines them: the bytecode of the loop and of those that it calls, and the
constants that they name, settings and version of numba, and the processor; numba adds the types of the
arguments and the version of Python. This is the only module that imports numba.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, TypeVar, cast

from dpro.cache import keep_latest, trusted_folder
from dpro.errors import DproError, needs_extra

Loop = TypeVar("Loop", bound=Callable[..., Any])

KEPT = 1000  # files: those of some ten versions, two for each loop
_OF_PROCESSOR = ("model", "flags", "Features", "CPU ")  # lines of /proc/cpuinfo


def can_compile() -> bool:
    """Whether numba is installed; where it is not, the first call of a loop says so."""
    return find_spec("numba") is not None


def is_loaded() -> bool:
    """Whether this process has loaded numba, which takes 0.3 s of CPU."""
    return "numba" in sys.modules


def is_kept(loop: Callable[..., Any]) -> bool:
    """Whether a loop's machine code is on disk."""
    try:
        return any(trusted_folder("loops").glob(f"*{_digest(cast(CompiledLoop, loop))}*.nbi"))
    except (DproError, OSError):
        return False


@functools.cache
def run_beside(module: str) -> subprocess.Popen[bytes] | None:
    """Start a process of the lowest priority that runs a module, to compile a loop which others wait for."""
    with suppress(OSError):  # no more processes: nothing is lost but speed
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # not what lies where the command is run
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the command alone
        )
    return None


def compile_beside(call: Callable[[], object]) -> None:
    """What such a process does, unless another one does it already.

    Args:
        call: calls the loop.
    """
    os.nice(19)
    folder = os.open(trusted_folder("loops"), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    except OSError:  # a file system without locks
        pass
    call()


def compiled(loop: Loop) -> Loop:
    """The loop as machine code, kept on disk where there is a place for it: only the first run compiles.

    Args:
        loop: in the part of Python that numba compiles; what it is given has no names.
    """
    return cast(Loop, CompiledLoop(loop))


def inlined(loop: Loop) -> Loop:
    """The same of a loop that makes no array, and becomes a part of the machine code of loops that call it.

    Called as a function of its own, a loop is handed seven values for each array, on the stack: that takes
    longer than many a small one does. Who uses its arrays is not counted, since its callers hold them.
    """
    return cast(Loop, InlinedLoop(loop))


class CompiledLoop:
    """A loop that is compiled when it is first called; until then, numba is not loaded.

    Attributes:
        settings: options of `njit`.
    """

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, loop: Callable[..., Any]) -> None:
        """Nothing is compiled yet."""
        functools.update_wrapper(self, loop)
        self.py_func: Any = loop

    def __call__(self, *given: Any) -> Any:
        """Run it."""
        return self._by_numba(*given)

    @functools.cached_property
    def _by_numba(self) -> Any:
        njit = _load_njit()
        from numba.core.caching import CompileResultCacheImpl, FunctionCache

        dispatcher = njit(**self.settings)(self.py_func)
        try:
            place = _Place(trusted_folder("loops"), _digest(self))
        except (DproError, OSError):  # no folder that is the user's alone
            return dispatcher

        class Kept(CompileResultCacheImpl):  # type: ignore[misc]
            _locator_classes = (place,)

        class KeptThere(FunctionCache):  # type: ignore[misc]
            _impl_class = Kept

            def load_overload(self, *of: Any) -> Any:
                try:
                    return super().load_overload(*of)
                except Exception:  # a file that is not whole, whatever unpickling makes of it
                    with suppress(OSError):
                        self.flush()

            def save_overload(self, *of: Any) -> None:
                with suppress(OSError):  # a full disk
                    super().save_overload(*of)

        dispatcher._cache = KeptThere(self.py_func)
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """What numba takes the loop for in others that call it."""
        return self._by_numba._numba_type_


class InlinedLoop(CompiledLoop):
    """A loop that is a part of others."""

    settings: ClassVar[dict[str, Any]] = {"_nrt": False, "error_model": "numpy", "forceinline": True}

    @functools.cached_property
    def _part(self) -> Any:
        """As others call it: kept with them, and without what calls from Python and C need."""
        return _load_njit()(**self.settings, no_cpython_wrapper=True, no_cfunc_wrapper=True)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        return self._part._numba_type_


def _load_njit() -> Any:
    with needs_extra("replay"):
        from numba import njit
    return njit


class _Place:
    """Where numba keeps the machine code of one loop, as it asks for it."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._digest = folder, digest

    def from_function(self, _function: object, _file: str) -> _Place:
        return self

    def ensure_cache_path(self) -> None:
        keep_latest(self._folder, "*.nb[ci]", KEPT)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._digest

    def get_disambiguator(self) -> str:
        return self._digest


def _digest(loop: CompiledLoop) -> str:
    asked = sorted(setting for setting in os.environ.items() if setting[0].startswith("NUMBA_"))
    return hashlib.blake2b(repr([asked, _machine(), *_identity(loop)]).encode(), digest_size=16).hexdigest()


@functools.cache
def _machine() -> tuple[str, ...]:
    """What else machine code depends on: numba's version and the processor."""
    lines: list[str] = []
    with suppress(OSError), open("/proc/cpuinfo") as file:
        lines = file.read(1 << 14).partition("\n\n")[0].splitlines()
    return metadata.version("numba"), *(line for line in lines if line.startswith(_OF_PROCESSOR))


def _identity(loop: CompiledLoop) -> Iterator[object]:
    """What determines the machine code of a loop, but for the types of its arguments."""
    function = loop.py_func
    code = function.__code__
    yield from (loop.settings, function.__defaults__)
    yield from (code.co_code, code.co_varnames, code.co_names, getattr(code, "co_exceptiontable", b""))
    for constant in code.co_consts:
        yield None if isinstance(constant, CodeType) else constant
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, CompiledLoop):
            yield from _identity(value)
        else:
            yield value.__name__ if isinstance(value, ModuleType) else repr(value)
