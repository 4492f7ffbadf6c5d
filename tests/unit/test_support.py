"""The page of what dpro was tried with is current, and claims no more than tests said."""

from __future__ import annotations

import re

import pytest

from tests.support import CELLS, PAGE, ROOT, Result, kept, name_of, page, said


def test_the_page_is_of_the_kept_results():
    assert PAGE.read_text() == page(kept()), "python -m tests.support --write"


def test_results_are_of_cells_that_there_are():
    assert kept().keys() <= {name_of(cell) for cell in CELLS if cell.tests}


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.tests], ids=name_of)
def test_tests_of_a_cell_exist(cell):
    for named in cell.tests:
        path, _, function = named.partition("::")
        assert (ROOT / path).exists()
        assert not function or re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_what_was_skipped_was_not_tried_and_what_failed_says_so():
    assert said(None) == said(Result("2026-01-01", "", 0, 7, 0)) == "not tried"
    assert said(Result("2026-01-01", "x 1.2", 3, 1, 0)) == "3 passed, 1 skipped with x 1.2, 2026-01-01"
    assert said(Result("2026-01-01", "", 3, 0, 2)) == "3 passed, **2 failed**, 2026-01-01"
