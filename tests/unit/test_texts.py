"""Texts that jobs write, read so that tables and files can hold them."""

import json

import pytest

from dpro.words import counted, distinct_names, from_json, short_name, whole_number


def test_halves_of_surrogate_pairs_in_json_are_spelt_out_and_pairs_are_kept():
    text = json.dumps({"a \ud800": ["\udcff", 1, None], "b": "\U0001f600", "c": r"\ud800"})
    expected = {r"a \ud800": [r"\udcff", 1, None], "b": "\U0001f600", "c": r"\ud800"}
    assert from_json(text) == from_json(text.encode()) == expected
    assert from_json('"\U0001f600 plain"') == "\U0001f600 plain"


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("9" * 18, 10**18 - 1), ("\u0663", 3)]
    + [(text, -1) for text in ("", "-1", " 1", "1.0", "1_0", "\u00b2", "\u00bd", "9" * 19, "9" * 5000)],
)
def test_a_whole_number_has_digits_alone_and_fits_into_64_bits(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::softmax<at::Half, 4>(int*)", "softmax<Half, 4>"),
        ("void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*, int*, void", "combine<3, 10, 7168, 9>"),
        (
            "at::native::add<at::native::op(float)::{lambda(float)#1}>(int)",
            "add<op(float)::{lambda(float)#1}>",
        ),
        (
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllGather_RING_LL",
        ),
        ("void at::vec<4, void at::impl<at::Half>, at::f>(int)", "vec<4, impl<Half>, f>"),
        ("<built-in method astype of numpy.ndarray object at 0x7cbf780f01b0>", "numpy.ndarray.astype"),
        ("<built-in function array>", "array"),
        ("aten::mm", "aten::mm"),
        (
            "autograd::engine::evaluate_function: AddmmBackward0",
            "autograd::engine::evaluate_function: AddmmBackward0",
        ),
        ("enumerate(DataLoader)#_Iter.__next__", "enumerate(DataLoader)#_Iter.__next__"),
        ("nvjet_tst_256x128_64x4_NNT", "nvjet_tst_256x128_64x4_NNT"),
        ("", ""),
    ],
)
def test_a_name_is_short_where_its_own_part_is_known(name, short):
    assert short_name(name) == short


def test_what_is_counted_agrees_with_its_number():
    assert [counted(n, "step") for n in (0, 1, 2, 12_000)] == ["0 steps", "1 step", "2 steps", "12,000 steps"]


@pytest.mark.parametrize(
    ("names", "cut"),
    [
        (["gemm_64x64", "gemm_128"], ["gemm_64x64", "gemm_128"]),
        (["a" * 30], ["a" * 15 + "…"]),
        (["kernel_" * 4 + "64x1_nt", "kernel_" * 4 + "64x2_nt"], ["kernel_k…64x1_nt", "kernel_k…64x2_nt"]),
        (["kernel_" * 4 + "8_" + "b" * 20, "kernel_" * 4 + "9"], ["kernel_…8_bbbbb…", "kernel_kernel_…9"]),
        (["forward_" * 3, "forward_" * 3 + "of_cpu"], ["forward_forward…", "forward_f…of_cpu"]),
        (["flash_attention", "flash_attention_back"], ["flash_attention", "flash_a…tion_ba…"]),
        # Each differs from another at 13 and from a third at 30: no part of 16 characters distinguishes all.
        (
            [f"elementwise_{place}_{'m' * 20}{what}" for place in "24" for what in ("mul", "add")],
            ["elementw…mmmmmul", "elementw…mmmmadd", "eleme #2…mmmmmul", "eleme #2…mmmmadd"],
        ),
        (["same_" * 9, "same_" * 9], ["same_same_same_…"] * 2),
    ],
)
def test_names_are_cut_so_that_different_ones_differ(names, cut):
    assert distinct_names(names, 16) == cut
