"""What belongs to a job is looked at without code of the job's running, and without its modes seeing it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dpro.collectors.inside import unseen  # noqa: E402


class Trap:
    """An object that ends the process whenever it is asked for anything."""

    def __getattribute__(self, name: str) -> object:
        sys.exit(name)

    __eq__ = __bool__ = __len__ = __iter__ = __str__ = __repr__ = __fspath__ = __getattribute__  # type: ignore


class TrappedTensor(torch.Tensor):
    """A tensor whose operators are the job's own."""

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        sys.exit("dispatched")


def error_of(action: object) -> BaseException:
    try:
        action()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "raise_it",
    [
        lambda: {}["key"],
        lambda: os.stat("/no/such/file"),
        lambda: int("x"),
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: (_ for _ in ()).throw(ValueError("two", 2)),
        lambda: (_ for _ in ()).throw(RuntimeError()),
    ],
)
def test_message_of_an_exception_of_c_is_the_one_that_python_shows(raise_it):
    error = error_of(raise_it)
    assert unseen.message_of(error) == str(error)


def test_message_of_an_exception_with_words_of_its_own_is_what_it_was_raised_with():
    class Worded(Exception):
        def __str__(self) -> str:
            sys.exit("asked")

    assert unseen.message_of(Worded("out of", 3)) == "('out of', 3)"
    assert unseen.message_of(Worded()) == ""
    assert unseen.message_of(Worded(Trap())) == ""
    assert unseen.message_of(ExceptionGroup("many", [ValueError()])) == "many"
    trapped = FileNotFoundError(2, "none", "file")
    trapped.filename = Trap()
    assert unseen.message_of(trapped) == "(2, 'none')"
    assert unseen.message_of(subprocess.CalledProcessError(1, "cmd")) == "(1, 'cmd')"


def test_attributes_are_those_of_the_object_itself():
    class Slots:
        __slots__ = ()

    class Hidden:
        @property
        def __dict__(self) -> dict[str, object]:  # type: ignore[override]
            sys.exit("asked")

    hidden = Hidden()
    hidden.kept = 1  # type: ignore[attr-defined]
    assert unseen.attributes(hidden) == {"kept": 1}
    assert unseen.attributes(Slots()) == {}
    assert unseen.attributes(Trap()) == {}
    assert unseen.attributes(3) == {}


def test_path_is_known_of_texts_paths_and_open_files_only(tmp_path):
    path = tmp_path / "file"
    assert unseen.path_of(str(path)) == unseen.path_of(path) == unseen.path_of(bytes(path)) == str(path)
    for mode in ("w", "wb", "rb", "r+b", "r"):
        with path.open(mode) as file:
            assert unseen.path_of(file) == str(path)
    assert unseen.path_of(Trap()) == unseen.path_of(None) == unseen.path_of(3) == ""
    with open(0, closefd=False) as file:
        assert unseen.path_of(file) == ""

    class Mine(type(Path())):  # type: ignore[misc]
        def __str__(self) -> str:
            sys.exit("asked")

    assert unseen.path_of(Mine("x")) == ""


def test_code_of_a_handler_is_found_in_functions_methods_partials_and_callables():
    class Callable:
        def __call__(self) -> None: ...

        def method(self) -> None: ...

    assert unseen.code_of(Callable()) is Callable.__call__.__code__
    assert unseen.code_of(Callable().method) is Callable.method.__code__
    assert unseen.code_of(functools.partial(functools.partial(Callable().method))) is Callable.method.__code__
    assert unseen.code_of(Trap()) is None
    assert unseen.code_of(print) is None


def test_modes_of_the_job_see_nothing_of_what_is_asked_of_a_tensor():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    tensor = torch.nn.Parameter(torch.ones(2, 3))
    tensor.grad = torch.ones(2, 3)
    with Functions(), Operators():
        assert unseen.elements_of(tensor) == 6
        assert unseen.shape_of(tensor) == [2, 3]
        assert unseen.bytes_of(tensor) == 24
        assert str(unseen.device_of(tensor)) == "cpu"
        assert unseen.dtype_of(tensor) == "float32"
        assert unseen.wants_gradient(tensor)
        assert unseen.gradient_of(tensor) is not None
        assert seen == []
        tensor.numel()
        assert len(seen) == 1  # they see again what the job does


def test_modes_see_again_what_the_job_does_when_a_question_failed():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Functions():
        with pytest.raises(TypeError):
            unseen.unseen(torch.Tensor.numel, 3)
        tensor.numel()
    assert len(seen) == 1


def test_a_tensor_whose_operators_are_the_jobs_is_not_asked():
    tensor = torch.ones(2).as_subclass(TrappedTensor)
    assert not unseen.is_answered_in_c(tensor)
    assert (unseen.elements_of(tensor), unseen.shape_of(tensor), unseen.device_of(tensor)) == (0, [], None)


def test_modules_and_parameters_are_those_that_a_model_names_itself():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(8, 8), layer)
    model[1].weight = layer.linear1.weight
    assert dict(unseen.modules_of(model)) == dict(model.named_modules())
    assert [name for name, _ in unseen.modules_of(model)] == [name for name, _ in model.named_modules()]
    assert list(map(id, dict(unseen.parameters_of(model)).values())) == list(map(id, model.parameters()))
    every = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in unseen.parameters_of(model, every=True)] == every
    scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(2, 3)))
    assert [unseen.shape_of(weight) for _, weight in unseen.parameters_of(scripted)] == [[3, 2], [3]]


def test_parameters_of_an_optimizer_are_found_in_it_or_in_the_one_within():
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> object:
            sys.exit("asked")

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    assert unseen.parameters_updated(optimizer) == [weight]
    assert unseen.parameters_updated(Wrapped(optimizer)) == [weight]
    assert unseen.parameters_updated(Trap()) == []


def test_calls_of_a_folder_are_taken_out_of_tracebacks(tmp_path):
    def raise_it() -> None:
        raise ValueError

    exec(compile("def wrapper(call):\n    call()", str(tmp_path / "ours.py"), "exec"), names := {})
    error = error_of(lambda: names["wrapper"](lambda: names["wrapper"](raise_it)))
    unseen.hide_frames(error, str(tmp_path))
    place, functions = error.__traceback__, []
    while place is not None:
        functions.append(place.tb_frame.f_code.co_name)
        place = place.tb_next
    assert functions == ["error_of", "<lambda>", "<lambda>", "raise_it"]
