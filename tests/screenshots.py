"""Pictures of the dashboard and of a report, by a real browser: `make screenshots` takes them for the docs.

Out: one WebP file per picture in the folder that is named.
"""

from __future__ import annotations

import base64
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from dpro.dashboards.loaded import Loaded
from dpro.dashboards.report import html_of
from dpro.opening import open_path
from dpro.verdict.report import make_report
from tests.browser import served, settle, start_browser, wait
from tests.conftest import REPOSITORY
from tests.gallery import DRAWN
from tests.reference.hanging_dumps import dumps_of_a_stuck_host

SAMPLE = REPOSITORY / "sample_traces" / "slow_rank"
WIDTH, HEIGHT = 1440, 810
QUALITY = 80
VIEWS = {  # name of the picture -> query of the sample's dashboard
    "verdict": "?view=verdict",
    "timeline": "?view=timeline&steps=31",
}


def main(folder: Path) -> None:
    """Take all pictures."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request is of no use
    folder.mkdir(parents=True, exist_ok=True)
    browser = start_browser()
    try:
        browser.set_window_size(WIDTH, HEIGHT + 140)  # of which the window itself takes some
        sample = Loaded(open_path(SAMPLE))
        with served(sample) as address:
            for name, query in VIEWS.items():
                _take(browser, f"{address}{query}", folder / f"{name}.webp")
        with tempfile.TemporaryDirectory() as place:
            _report(browser, sample, Path(place), folder / "report.webp")
            with served(Loaded(open_path(dumps_of_a_stuck_host(Path(place) / "dumps")))) as address:
                _take(browser, f"{address}?view=hang", folder / "hang.webp")
    finally:
        browser.quit()


def _take(browser: Any, address: str, file: Path) -> None:
    browser.get(address)
    settle(browser)
    wait(browser, DRAWN)
    _shoot(browser, file)


def _report(browser: Any, loaded: Loaded, place: Path, file: Path) -> None:
    (place / "report.html").write_text(html_of(loaded, make_report(loaded)))
    browser.get(f"file://{place}/report.html")
    wait(browser, "return document.documentElement.dataset.drawn === 'all'")
    _shoot(browser, file)


def _shoot(browser: Any, file: Path) -> None:
    browser.execute_async_script(
        "const done = arguments[0]; setTimeout(done, 1500)"
    )  # what moves comes to rest
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
    wanted = {"format": "webp", "quality": QUALITY, "clip": clip}
    picture = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", wanted)["data"])
    file.write_bytes(picture)
    print(f"{file}: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
