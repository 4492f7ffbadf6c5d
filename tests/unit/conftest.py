"""GPUs of made-up libraries."""

from contextlib import ExitStack

import pytest


@pytest.fixture
def opening():
    """Opens GPUs while a made-up library is there: the GPUs, and what was complained of."""
    with ExitStack() as stack:

        def open_(gpus, library):
            stack.enter_context(library)
            complaints = []
            return gpus(complaints.append), complaints

        yield open_
