"""Names of C++ functions, as a linker and as a person writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.ingest.reading.symbols import demangled

ADD = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEEEEviT0_"


@pytest.mark.parametrize("name", [ADD, f"{ADD}.kd"])
def test_the_name_of_a_linker_is_read(name):
    assert (
        "at::native::vectorized_elementwise_kernel<(int)4, at::native::CUDAFunctor_add<float>>"
        in demangled(name)
    )


@pytest.mark.parametrize(
    "name", ["nccl:all_reduce", "_Z", "_Zero", "_ZN2at6nativeZZZNS0_49", "void add<float>(int)", ADD[:30], ""]
)
def test_what_is_no_such_name_or_cannot_be_read_stays(name):
    assert demangled(name) == name


@given(st.text("_ZN0123456789IELiTSKPaedfv", max_size=40).map("_Z".__add__))
def test_no_name_fails(name):
    assert isinstance(demangled(name), str)
