"""Web views of a run: one module per view, with data separate from figures; needs the extra `dashboard`.

Takes an opened run, and others to choose from; serves a local web application. Computes nothing that a
command could not print. All state is in the link: clicks and selections change the link, and each section is
rendered from the link alone, by its own request.
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
    """Log the current exception with its traceback; return the message shown in place of the part."""
    log.exception("dpro dashboard: %s", part)
    return "internal error in dpro; see the terminal that it runs in"
