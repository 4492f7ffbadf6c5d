"""What runs on a GPU only is skipped elsewhere, and says so."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def gpu() -> str:
    """The name of the first GPU; without one the test is skipped."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"no GPU: torch {torch.__version__} sees none; docs/gpu.md says what is unmeasured")
    return torch.cuda.get_device_name(0)
