"""Loops over arrays as machine code that is kept on disk, and loaded again without numba.

In: functions over flat arrays. Out: the same, compiled by numba when they are first called. Importing numba
and making it ready takes longer than most answers, so the machine code of a loop is kept as an object file,
and LLVM loads it alone (llvmlite, on which numba rests). Only code is kept that can run by itself: it raises
nothing, allocates nothing, calls nothing, takes arrays and numbers, and returns a whole number or nothing. Of
all other loops, on other processors than x86-64, and where a `NUMBA_` variable asks for something, numba does
it all, with its own cache.

An object file is found by what determines it: the bytecode of the loop and of those that it calls, the
constants that they name, the types of the arguments, the processor, and the versions of Python, LLVM and
numba. It lies beside the compiled Python modules, or where that folder cannot be written to in the user's
own cache. This is the only module that imports numba.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, TypeVar, cast

import numpy as np

from dpro.cache import cache_folder, keep_latest
from dpro.errors import DproError, MissingExtra
from dpro.folders import written_whole

_FOUND = find_spec("numba")
if _FOUND is None or _FOUND.origin is None:  # pragma: no cover - numba is there wherever tests run
    raise MissingExtra("numba", "replay")
NUMBA = Path(_FOUND.origin).parent

Loop = TypeVar("Loop", bound=Callable[..., Any])
Kind = Any  # what is to know of an argument: a text, or a tuple of kinds

FORMAT = b"2"  # of what is kept; another one for each change of this module that changes it
DIGEST_BYTES = 16
KEPT = 400  # files: those of some ten versions, four kilobytes each
# What an array is to a compiled loop; shape and strides have one number per dimension.
ARRAY = ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides")
# What code may name that is not its own: LLVM makes instructions of it, or calls of the C library.
INTRINSICS = re.compile(
    r"llvm\.(mem(cpy|set|move)|[su](min|max|add|sub|mul)|abs|assume|masked|vector|lifetime)\b"
)
# What LLVM may make a call of that is named nowhere: remainders of fractions, and numbers of 128 bits.
HIDDEN_CALLS = re.compile(r"(?<![\w.])(?:frem|i128)\b")  # not within a name
NOTHING, WHOLE_NUMBER, BY_NUMBA = b"n", b"i", b"-"  # what a loop returns; the last: its code is not kept


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

    Args:
        loop: in the part of Python that numba compiles.
    """
    return cast(Loop, InlinedLoop(loop))


class CompiledLoop:
    """A loop, and the machine code of it for each kind of arguments seen so far.

    Attributes:
        settings: options of `njit`.
    """

    settings: ClassVar[dict[str, Any]] = {}

    def __init__(self, loop: Callable[..., Any]) -> None:
        """Nothing is compiled yet."""
        functools.update_wrapper(self, loop)
        self.py_func: Any = loop
        self._code: dict[Kind, Callable[..., Any]] = {}

    def __call__(self, *given: Any) -> Any:
        """Run it.

        Args:
            given: arrays, numbers, and tuples of them.
        """
        kinds = tuple(map(_kind, given))
        code = self._code.get(kinds)
        if code is None:
            with _LOADING:
                code = self._code.get(kinds)  # another thread may have loaded it meanwhile
                if code is None:
                    code = self._code[kinds] = self._loaded(kinds, given)
        return code(*given)

    @functools.cached_property
    def by_numba(self) -> Callable[..., Any]:
        """The loop as numba has it, kept in numba's own cache."""
        from numba import njit

        loop: Callable[..., Any]
        try:
            loop = njit(cache=True, **self.settings)(self.py_func)
        except RuntimeError:  # neither the package's folder nor the user's cache can be written to
            loop = njit(**self.settings)(self.py_func)
        return loop

    @functools.cached_property
    def _within(self) -> Any:
        """The loop for others that call it; not from numba's cache, which does not know all constants."""
        from numba import njit

        return njit(**self.settings)(self.py_func)

    @property
    def _numba_type_(self) -> Any:
        """What numba takes the loop for."""
        return self._within._numba_type_

    def _loaded(self, kinds: tuple[Kind, ...], given: tuple[Any, ...]) -> Callable[..., Any]:
        if not _can_be_kept(kinds):
            return self.by_numba
        name = _digest([*_identity(self), kinds, *_surroundings()])
        kept = _read(name)
        if kept is None:
            kept = _made(self, given, name)
            _write(name, kept)
        if kept[:1] == BY_NUMBA:
            return self.by_numba
        return _callable(_linked(kept[1:], name), kept[:1], kinds)


class InlinedLoop(CompiledLoop):
    """A loop that is a part of others."""

    settings: ClassVar[dict[str, Any]] = {"_nrt": False, "error_model": "numpy", "forceinline": True}


_LOADING = threading.RLock()


def _kind(value: Any) -> Kind:
    """What machine code has to know of an argument; None of what it cannot take."""
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind in "biuf":
        flags = value.flags
        layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        return value.dtype.str, value.ndim, layout, flags.writeable, flags.aligned
    if type(value) is np.int64 or (type(value) is int and -(2**63) <= value < 2**63):
        return "i64"
    if type(value) is float or type(value) is np.float64:
        return "double"
    if type(value) is tuple:
        return ("tuple", *map(_kind, value))
    return None


def _flat(kind: Kind) -> Iterator[str]:
    """The types of what one argument is in machine code, pointers as `ptr`."""
    if isinstance(kind, str):
        yield kind
    elif kind[0] == "tuple":
        for each in kind[1:]:
            yield from _flat(each)
    else:
        yield from ("ptr", "ptr", "i64", "i64", "ptr", *["i64"] * (2 * kind[1]))


def _can_be_kept(kinds: tuple[Kind, ...]) -> bool:
    def known(kind: Kind) -> bool:
        return kind is not None and (kind[0] != "tuple" or all(map(known, kind[1:])))

    asked = any(name.startswith("NUMBA_") for name in os.environ)
    return platform.machine() == "x86_64" and not asked and all(map(known, kinds))


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


@functools.cache
def _surroundings() -> tuple[object, ...]:
    import llvmlite
    import llvmlite.binding as llvm

    numba = (NUMBA / "_version.py").read_bytes()
    processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return FORMAT, sys.version, llvmlite.__version__, numba, *processor


def _digest(parts: list[object]) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=DIGEST_BYTES).hexdigest()


def _folders() -> Iterator[Path]:
    """Where object files may lie: beside Python's own compiled modules, and in the user's cache."""
    yield Path(__file__).with_name("__pycache__")
    with suppress(DproError):
        yield cache_folder("loops")


def _read(name: str) -> bytes | None:
    """What is kept by this name, whole; None where there is no such file."""
    for folder in _folders():
        with suppress(OSError):
            content = (folder / f"{name}.loop").read_bytes()
            kept = content[DIGEST_BYTES:]
            if kept and _seal(name, kept) == content[:DIGEST_BYTES]:
                return kept
    return None


def _write(name: str, kept: bytes) -> None:
    """Keep it in the first folder that takes it, if any does."""
    for folder in _folders():
        with suppress(OSError, DproError):
            folder.mkdir(exist_ok=True)
            with written_whole(folder.resolve(), f"{name}.loop") as file:
                file.write(_seal(name, kept) + kept)
            keep_latest(folder, "*.loop", KEPT)
            return


def _seal(name: str, kept: bytes) -> bytes:
    """A digest of what is kept and of its name: in the file of another loop, code would not be found."""
    return hashlib.blake2b(kept, digest_size=DIGEST_BYTES, key=name.encode()).digest()


def _made(loop: CompiledLoop, given: tuple[Any, ...], name: str) -> bytes:
    """Machine code of a loop, or that there is none to keep.

    Args:
        loop: what to compile.
        given: arguments, of which only the types count.
        name: for the compiled function.
    """
    import llvmlite.binding as llvm
    from numba import njit, typeof
    from numba.core.datamodel import default_manager

    dispatcher: Any = loop.by_numba
    types = tuple(map(typeof, given))
    dispatcher.compile(types)
    if dispatcher.stats.cache_hits[types]:  # only the machine code was kept, with what calls it from Python
        dispatcher = njit(**loop.settings)(loop.py_func)
        dispatcher.compile(types)
    made = dispatcher.overloads[types]
    returned = {"none": NOTHING, "int64": WHOLE_NUMBER}.get(str(made.signature.return_type))
    module = llvm.parse_assembly(dispatcher.inspect_llvm(types))
    own = made.fndesc.llvm_func_name
    machine = _machine()
    _leave_only(module, own, machine)
    arrays = [default_manager.lookup(each)._fields for each in types if hasattr(each, "layout")]
    takes = [str(each.type) for each in module.get_function(own).arguments]
    expected = ["ptr", "ptr", *(each for value in given for each in _flat(_kind(value)))]
    if returned is None or takes != expected or any(each != ARRAY for each in arrays):
        return BY_NUMBA
    if not _runs_by_itself(module, own):
        return BY_NUMBA
    module.get_function(own).name = name
    code: bytes = machine.emit_object(module)
    return returned + code


def _leave_only(module: Any, own: str, machine: Any) -> None:
    """Remove what one function of a module does not need, such as numba's ways to call it from Python."""
    import llvmlite.binding as llvm

    for each in (*module.functions, *module.global_variables):
        if not each.is_declaration and each.name != own:
            each.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(0)))


def _runs_by_itself(module: Any, own: str) -> bool:
    """Whether a function always returns success, and nothing is named that is not in its module."""
    named = [each.name for each in (*module.functions, *module.global_variables) if each.is_declaration]
    returns = re.findall(r"^\s*ret (.*?)(?:,|$)", str(module.get_function(own)), re.MULTILINE)
    hidden = any(HIDDEN_CALLS.search(str(each)) for each in module.functions if not each.is_declaration)
    return set(returns) == {"i32 0"} and all(map(INTRINSICS.match, named)) and not hidden


def _machine() -> Any:
    """This processor, as numba describes it to LLVM."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static",
        codemodel="jitdefault",
        jit=True,
    )


@functools.cache
def _linker() -> Any:
    """What puts object files into memory."""
    import llvmlite.binding as llvm

    machine = _machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _linked(code: bytes, name: str) -> int:
    """The address at which a function of an object file now lies."""
    import llvmlite.binding as llvm

    linker = _linker()
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    address: int = linker.get_function_address(name)
    return address


CTYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "double": ctypes.c_double}


def _callable(address: int, returns: bytes, kinds: tuple[Kind, ...]) -> Callable[..., int | None]:
    """The machine code at an address as a function of arrays and numbers.

    numba passes where to put the result, where to put an exception, and then the arguments: of arrays what
    `ARRAY` lists, of tuples what they hold. What owns an array's memory is left out: the caller does.

    Args:
        address: of machine code.
        returns: what the loop does.
        kinds: of the arguments.
    """
    fields = [CTYPES[each] for kind in kinds for each in _flat(kind)]
    call = ctypes.PYFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *fields)(address)

    def run(*given: Any) -> int | None:
        result = ctypes.c_int64()
        flat: list[Any] = []
        _flatten(given, flat)
        call(ctypes.addressof(result), None, *flat)
        return result.value if returns == WHOLE_NUMBER else None

    return run


def _flatten(values: tuple[Any, ...], flat: list[Any]) -> None:
    for value in values:
        if type(value) is np.ndarray:
            data = value.__array_interface__["data"][0]
            flat += (None, None, value.size, value.itemsize, data, *value.shape, *value.strides)
        elif type(value) is tuple:
            _flatten(value, flat)
        else:
            flat.append(value)
