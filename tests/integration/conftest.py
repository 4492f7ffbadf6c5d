"""A browser, and a dashboard of a sample run for it."""

import pytest


@pytest.fixture(scope="module")
def browser():
    from tests.browser import start_browser

    chromium = start_browser()
    yield chromium
    chromium.quit()


@pytest.fixture(scope="module")
def sample(repository):
    """The address of a dashboard of the run with a slow rank."""
    from dpro.cli.run.dashboard import load
    from dpro.store import open_run
    from tests.browser import served

    with served(load(open_run(repository / "sample_traces" / "slow_rank"))) as address:
        yield address
