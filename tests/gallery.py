"""A gallery of the dashboard and of reports, to be looked at: runs × views × widths × dark and light.

In: runs or folders of traces; without any, the samples and what `DPRO_TRACES` names. Out: PNG files and a
page that shows them, in the folder that is named. A page that is wider than its window is printed.
"""

from __future__ import annotations

import argparse
import base64
import html
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpro.dashboards.app import VIEWS
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.report import html_of
from dpro.opening import open_path
from dpro.verdict.report import make_report
from tests.browser import served, settle, start_browser, wait
from tests.conftest import REPOSITORY

WIDTHS = (390, 820, 1440)
THEMES = ("light", "dark")
HEIGHT = 900
_SAMPLES = ("healthy", "slow_rank", "slow_input")
_TRACES = (
    "multirank/nanogpt_h100_8r_rs_ag",
    "multirank/hta_a100_sampled_0_1_of_128",
    "multirank/lightllm_h200_8r_deepep_cudagraph",
    "multirank/torchrec_v100_4r_sleep1s_rank2",
    "flight_recorder/lock_gil_1st",
    "pp_timeline/megatronapp_pp4",
)
DRAWN = """
return [...document.querySelectorAll('.dash-graph')].every(each => each.querySelector('.main-svg'))
  && !document.querySelector('[data-loading]')
  && (!document.querySelector('#timeline')
    || / spans of [0-9]/.test(document.querySelector('main').innerText));
"""
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def main() -> None:
    """Take all pictures that are asked for."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("runs", nargs="*", type=Path)
    options.add_argument("--views", nargs="*", default=[view.name for view in VIEWS] + ["report"])
    options.add_argument("--widths", nargs="*", type=int, default=WIDTHS)
    options.add_argument("--themes", nargs="*", default=THEMES)
    chosen = options.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    browser = start_browser()
    try:
        taken = [picture for run in chosen.runs or _runs() for picture in _pictures(browser, run, chosen)]
    finally:
        browser.quit()
    shown = "<figure><img loading=lazy src='{0}'><figcaption>{0}</figcaption></figure>"
    figures = "".join(shown.format(html.escape(name)) for name in taken)
    style = "<style>body{display:flex;flex-wrap:wrap;gap:8px}img{max-width:460px}figure{margin:0}</style>"
    (chosen.folder / "index.html").write_text(f"<!DOCTYPE html><title>Gallery</title>{style}{figures}")


def _runs() -> list[Path]:
    """The samples, and the traces that are there."""
    traces = Path(os.environ.get("DPRO_TRACES", REPOSITORY.parent / "shared" / "traces"))
    found = [REPOSITORY / "sample_traces" / name for name in _SAMPLES]
    return found + [traces / name for name in _TRACES if (traces / name).exists()]


def _pictures(browser: Any, run: Path, chosen: argparse.Namespace) -> Iterator[str]:
    loaded = Loaded(open_path(run))
    with tempfile.TemporaryDirectory() as place, served(loaded) as address:
        for view in chosen.views:
            if view == "report":
                (Path(place) / "report.html").write_text(html_of(loaded, make_report(loaded)))
            for theme in chosen.themes:
                for width in chosen.widths:
                    name = f"{run.name}-{view}-{width}-{theme}.png"
                    failed = _show_patiently(browser, view, width, theme, address, Path(place))
                    if failed:  # the others are taken
                        print(f"{name}: {failed}", flush=True)
                        continue
                    beyond = browser.execute_script(OVERFLOW)
                    if beyond > 0:
                        print(f"{name}: {beyond} px wider than its window", flush=True)
                    _shoot(browser, width, chosen.folder / name)
                    yield name


def _show_patiently(*shown: Any) -> str:
    """Open a view as `show` does, once more where that fails; returns what it failed with, or nothing."""
    for last in (False, True):
        try:
            show(*shown)
        except Exception as error:
            if last:
                return type(error).__name__
        else:
            break
    return ""


def show(browser: Any, view: str, width: int, theme: str, address: str, place: Path) -> None:
    """Open a view, or the report, and wait until it is drawn.

    Args:
        browser: as from `start_browser`.
        view: its name, or `report`.
        width: of the window, pixels.
        theme: light or dark.
        address: of the dashboard.
        place: the folder that has `report.html`.
    """
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    liked = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": liked})
    if view == "report":
        browser.get(f"file://{place}/report.html")
        wait(browser, "return document.documentElement.dataset.drawn === 'all'")
    else:
        browser.get(f"{address}?view={view}&theme={theme}")
        settle(browser)
        wait(browser, DRAWN)
    browser.execute_async_script("const done = arguments[0]; setTimeout(done, 400)")


def _shoot(browser: Any, width: int, file: Path) -> None:
    height = min(browser.execute_script("return document.documentElement.scrollHeight"), 4 * HEIGHT)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    wanted = {"format": "png", "clip": clip, "captureBeyondViewport": True}
    file.write_bytes(base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", wanted)["data"]))


if __name__ == "__main__":
    main()
