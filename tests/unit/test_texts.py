"""Texts that jobs write, read so that tables and files can hold them."""

import json

from dpro.words import from_json


def test_halves_of_surrogate_pairs_in_json_are_spelt_out_and_pairs_are_kept():
    text = json.dumps({"a \ud800": ["\udcff", 1, None], "b": "\U0001f600", "c": r"\ud800"})
    expected = {r"a \ud800": [r"\udcff", 1, None], "b": "\U0001f600", "c": r"\ud800"}
    assert from_json(text) == from_json(text.encode()) == expected
    assert from_json('"\U0001f600 plain"') == "\U0001f600 plain"
