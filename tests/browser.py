"""A real headless browser for tests, where there is one, and a dashboard for it to open."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dpro.dashboards.loaded import Loaded
from dpro.dashboards.runs import Runs, ShownRun
from dpro.dashboards.server import listen
from dpro.store import Run
from tests.builders import TinyRun

PATIENCE_S = 60
EVIL = "<img src=x onerror=window.pwned=1>"  # a name that would run a script if it were parsed as HTML
_SETTLED = """
return document.querySelectorAll("#content .panel").length > 0
  && !document.querySelector(".pending, [data-loading]")
  && !document.querySelector("[data-dash-is-loading=true]")
"""


def start_browser() -> Any:
    """Chromium, or the reason to skip."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    binary = next((path for path in found if path), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--use-angle=swiftshader",
        "--enable-unsafe-swiftshader",
        "--window-size=1500,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


@contextmanager
def served(loaded: Loaded | ShownRun | Runs, host: str = "127.0.0.1") -> Iterator[str]:
    """The address of a dashboard that runs meanwhile, and asks for no token."""
    server, address = listen(loaded, host, 0, token=None)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield address.replace("0.0.0.0", "127.0.0.1")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def evil_run(folder: Path) -> Run:
    """A run with kernels whose names would run a script or change the page if they were parsed as HTML."""
    run = TinyRun()
    for step in range(3):
        for number, name in enumerate((EVIL, "<b>bold</b>")):
            at = 1000 * step + 480 * number
            run.call(at, at + 5, 10 * step + number)
            run.kernel(name, at + 10, at + 470, 10 * step + number)
        run.step(step, 1000 * step, 1000 * step + 990)
    return run.write(folder)


def wait(browser: Any, script: str) -> Any:
    """What a script returns as soon as that is true."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE_S, 0.05).until(lambda it: it.execute_script(script), script)


def settle(browser: Any) -> None:
    """Wait until a view has filled."""
    wait(browser, _SETTLED)


def complaints(browser: Any) -> list[str]:
    """Errors that the browser has logged since it was last asked, without those of servers that are gone."""
    server = urlsplit(browser.current_url).netloc
    messages = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    return [message for message in messages if urlsplit(message.split()[0]).netloc in ("", server)]
