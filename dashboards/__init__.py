"""The web views: one file per view, with data separate from figures; needs the extra `dashboard`.

In: an opened run, and others to choose from. Out: a local web application. Nothing is computed here that a
command could not print. All state is in the link: clicks and selections change the link, and every section
is rendered from the link alone, each by its own request.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def defect_in(part: str) -> str:
    """Log the exception that is being handled, with its traceback; return what stands in the part's place."""
    log.exception("dpro dashboard: %s", part)
    return "dpro has a defect here; the terminal that it runs in says more"
