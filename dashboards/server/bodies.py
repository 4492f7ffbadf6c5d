"""Validation of request bodies: bounded size, and the inputs of an existing callback.

In: the application. Out: it answers 413 to bodies that are too large, and 400 to bodies that the page never
sends. Any later failure is a defect of dpro.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import Dash
from dash.exceptions import DependencyException
from flask import abort, request

MAX_BODY_BYTES = 1 << 20
_CALLBACKS = "/_dash-update-component"
_TYPES = {"search": (str, type(None))}  # property -> types of its values; those of others are only compared


def check_bodies(app: Dash) -> None:
    """Refuse invalid bodies before any callback sees them."""
    app.server.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES

    @app.server.before_request  # type: ignore[untyped-decorator]
    def check() -> None:
        if request.path != _CALLBACKS or request.method != "POST":
            return
        try:
            body = request.get_json()  # aborts where the body is too large or is not JSON
        except RecursionError:
            abort(400)
        if not _is_for_a_callback(body, app.callback_map):
            abort(400)

    @app.server.errorhandler(DependencyException)  # type: ignore[untyped-decorator]
    def no_such_file(_error: Exception) -> tuple[str, int]:
        return "no such file\n", 404


def _is_for_a_callback(body: Any, known: dict[str, Any]) -> bool:
    """Return whether a body names a callback with all its inputs and outputs, and gives values for them."""
    if not isinstance(body, dict) or not isinstance(body.get("output"), str):
        return False
    callback = known.get(body["output"], {})
    if "callback" not in callback:
        return False
    outputs, changed = body.get("outputs"), body.get("changedPropIds", [])
    return (
        _names(outputs if isinstance(outputs, list) else [outputs]) == _parts(body["output"])
        and _are_values(body.get("inputs", []), callback["inputs"])
        and _are_values(body.get("state", []), callback["state"])
        and isinstance(changed, list)
        and all(isinstance(each, str) for each in changed)
    )


def _parts(output: str) -> list[tuple[str, str]]:
    """Split `a.children` or `..a.figure...b.style..` into ids and properties."""
    several = output.removeprefix("..").removesuffix("..").split("...") if output[:2] == ".." else [output]
    return [(name, prop) for name, _, prop in (each.rpartition(".") for each in several)]


def _names(given: Sequence[Any]) -> list[Any]:
    return [(each.get("id"), each.get("property")) if isinstance(each, dict) else None for each in given]


def _are_values(given: Any, wanted: Sequence[dict[str, Any]]) -> bool:
    return (
        isinstance(given, list)
        and _names(given) == _names(wanted)
        and all(isinstance(each.get("value"), _TYPES.get(each["property"], object)) for each in given)
    )
