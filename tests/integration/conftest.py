"""A browser, a dashboard of a sample run for it, and an end of all jobs."""

import os

import pytest

from tests.jobs import kill_left


@pytest.fixture(scope="module", autouse=True)
def no_job_outlives_its_tests():
    """Jobs whose ranks wait for each other would do so for ever after a test that failed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_BY", str(os.getpid()))
        yield
    kill_left(f"TESTED_BY={os.getpid()}")


@pytest.fixture(scope="module")
def browser():
    from tests.browser import start_browser

    chromium = start_browser()
    yield chromium
    chromium.quit()


@pytest.fixture(scope="module")
def sample(repository):
    """The address of a dashboard of the run with a slow rank."""
    from dpro.dashboards.command import load
    from dpro.store import open_run
    from tests.browser import served

    with served(load(open_run(repository / "sample_traces" / "slow_rank"))) as address:
        yield address
