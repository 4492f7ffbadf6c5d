"""What the page is sent when its button for a deep window is pressed, without a browser."""

from __future__ import annotations

from typing import Any

HOST = {"Host": "localhost"}


def pressed(app: Any, by: str = "ask", search: str = "") -> tuple[bool, bool, str, bool] | None:
    """Whether the button is hidden and disabled, what it says, and whether nothing is waited for.

    Args:
        by: what has changed: `ask` is the button.

    Returns:
        None where the page has no such button.
    """
    outputs = {"window": "hidden", "ask": "disabled", "asked": "children", "asking": "disabled"}
    inputs = {"ask": "n_clicks", "asking": "n_intervals", "shown": "data", "version": "data"}
    body = {
        "output": f"..{'...'.join(f'{name}.{prop}' for name, prop in outputs.items())}..",
        "outputs": [{"id": name, "property": prop} for name, prop in outputs.items()],
        "inputs": [{"id": name, "property": prop, "value": None} for name, prop in inputs.items()],
        "state": [{"id": "url", "property": "search", "value": search}],
        "changedPropIds": [f"{by}.{inputs[by]}"],
    }
    answer = app.server.test_client().post("/_dash-update-component?token=token", json=body, headers=HOST)
    if answer.status_code != 200:
        return None
    response = answer.json["response"]
    hidden, disabled, said, rests = (response[name][prop] for name, prop in outputs.items())
    return hidden, disabled, said, rests
