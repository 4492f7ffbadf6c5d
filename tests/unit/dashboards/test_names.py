"""Names from traces are shown literally and never interpreted."""

from __future__ import annotations

import html

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.dashboards.theme import LONGEST_NAME, in_cell, plain


@given(st.text(max_size=60))
def test_a_name_is_shown_letter_by_letter(name):
    assert "<" not in plain(name)
    assert html.unescape(plain(name)) == name or "&" not in name


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "<b>", "&lt;b&gt;", '<a href="x">'])
def test_what_looks_like_html_stays_text(name):
    assert html.unescape(plain(name)) == name


def test_a_long_name_is_cut_and_that_shows():
    assert plain("k" * 500) == "k" * (LONGEST_NAME - 1) + "…"


def test_no_name_is_a_formula_of_a_spreadsheet():
    assert in_cell("=HYPERLINK()") == "'=HYPERLINK()"
    assert in_cell("gemm=1") == "gemm=1"
