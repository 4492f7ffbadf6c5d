"""Texts that jobs write, read so that tables and files can hold them."""

import json

import pytest

from dpro.words import from_json, whole_number


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
