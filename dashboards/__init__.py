"""The web views: one file per view, with data separate from figures; needs the extra `dashboard`.

In: an opened run, and others to choose from. Out: a local web application. Nothing is computed here that a
command could not print. All state is in the link: clicks and selections change the link, and every section
is rendered from the link alone, each by its own request.
"""

from __future__ import annotations

import logging

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "dashboard": Command("dpro.dashboards.command:dashboard", "View a run in a browser.", "Answer"),
    },
    options={"report": "dpro.dashboards.command:OPTIONS_OF_REPORT"},
    hooks={
        "report_pages": "dpro.dashboards.command:page_of_report",
        "notebook": "dpro.dashboards.command:open_for_figures",
    },
)
log = logging.getLogger(__name__)


def defect_in(part: str) -> str:
    """Log the exception that is being handled, with its traceback; return what stands in the part's place."""
    log.exception("dpro dashboard: %s", part)
    return "dpro has a defect here; the terminal that it runs in says more"
