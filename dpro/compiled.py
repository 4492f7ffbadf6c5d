"""Loops over arrays, compiled by numba at their first call and cached on disk.

Takes functions over flat arrays; returns them compiled. Numba's cache files are pickles, which could run
anything, so they are kept only in a cache folder that no other user may write to; without such a folder,
nothing is cached. The cache key covers the bytecode and the constants of the loop and of all loops that it
calls, numba's settings and version, and the processor; numba adds the types of the arguments and the version
of Python. No other module imports numba.
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

KEPT = 1000  # cache files: two per loop, for about ten versions of dpro
_OF_PROCESSOR = ("model", "flags", "Features", "CPU ")  # lines of /proc/cpuinfo


def can_compile() -> bool:
    """Return whether numba is installed; without it, the first call of a loop raises `MissingExtra`."""
    return find_spec("numba") is not None


def is_loaded() -> bool:
    """Return whether this process has imported numba, which takes 0.3 s of CPU time."""
    return "numba" in sys.modules


def is_kept(loop: Callable[..., Any]) -> bool:
    """Return whether a loop's machine code is in the cache on disk."""
    try:
        return any(trusted_folder("loops").glob(f"*{_digest(cast(CompiledLoop, loop))}*.nbi"))
    except (DproError, OSError):
        return False


@functools.cache
def run_beside(module: str) -> subprocess.Popen[bytes] | None:
    """Start a process that runs `module`, to compile loops in the background; None if it cannot start.

    Only the first call for a module starts a process.
    """
    with suppress(OSError):  # no more processes: only speed is lost
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: import nothing from the working directory
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the command alone
        )
    return None


def compile_beside(call: Callable[[], object]) -> None:
    """Compile a loop at the lowest priority, in a process of `run_beside`; return if another one is at it.

    Args:
        call: calls the loop, and so compiles it.
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
    """Return the loop compiled to machine code, cached on disk where a trusted folder exists.

    Args:
        loop: in the part of Python that numba compiles; its arguments are positional.
    """
    return cast(Loop, CompiledLoop(loop))


def inlined(loop: Loop) -> Loop:
    """Return the loop compiled for inlining into the loops that call it; it must not allocate arrays.

    An ordinary call passes seven values per array on the stack, which takes longer than the work of many
    small loops. References to its arrays are not counted, since the callers own them.
    """
    return cast(Loop, InlinedLoop(loop))


class CompiledLoop:
    """A loop that imports numba and compiles at its first call.

    Attributes:
        settings: options of `njit`.
    """

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, loop: Callable[..., Any]) -> None:
        functools.update_wrapper(self, loop)
        self.py_func: Any = loop

    def __call__(self, *given: Any) -> Any:
        """Run the loop, compiling it first if needed."""
        return self._by_numba(*given)

    @functools.cached_property
    def _by_numba(self) -> Any:
        njit = _load_njit()
        from numba.core.caching import CompileResultCacheImpl, FunctionCache

        dispatcher = njit(**self.settings)(self.py_func)
        try:
            place = _CacheLocator(trusted_folder("loops"), _digest(self))
        except (DproError, OSError):  # no trusted folder
            return dispatcher

        class Kept(CompileResultCacheImpl):  # type: ignore[misc]
            _locator_classes = (place,)

        class KeptThere(FunctionCache):  # type: ignore[misc]
            _impl_class = Kept

            def load_overload(self, *of: Any) -> Any:
                try:
                    return super().load_overload(*of)
                except Exception:  # unpickling a truncated file may raise anything
                    with suppress(OSError):
                        self.flush()

            def save_overload(self, *of: Any) -> None:
                with suppress(OSError):  # a full disk
                    super().save_overload(*of)

        dispatcher._cache = KeptThere(self.py_func)
        return dispatcher

    @property
    def _numba_type_(self) -> Any:
        """The numba type of the compiled loop, for loops that call it."""
        return self._by_numba._numba_type_


class InlinedLoop(CompiledLoop):
    """A loop that is inlined into the loops that call it."""

    settings: ClassVar[dict[str, Any]] = {"_nrt": False, "error_model": "numpy", "forceinline": True}

    @functools.cached_property
    def _part(self) -> Any:
        """The loop for inlining: cached with its callers, without wrappers for calls from Python and C."""
        return _load_njit()(**self.settings, no_cpython_wrapper=True, no_cfunc_wrapper=True)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        return self._part._numba_type_


def _load_njit() -> Any:
    with needs_extra("replay"):
        from numba import njit
    return njit


class _CacheLocator:
    """Cache locator of one loop, with the methods that numba requires."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._digest = folder, digest

    def from_function(self, _function: object, _file: str) -> _CacheLocator:
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
    """Return numba's version and the lines of /proc/cpuinfo that identify the processor."""
    lines: list[str] = []
    with suppress(OSError), open("/proc/cpuinfo") as file:
        lines = file.read(1 << 14).partition("\n\n")[0].splitlines()
    return metadata.version("numba"), *(line for line in lines if line.startswith(_OF_PROCESSOR))


def _identity(loop: CompiledLoop) -> Iterator[object]:
    """Yield all that determines the machine code of a loop, except the types of its arguments."""
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
