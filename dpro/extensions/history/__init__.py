"""History of hosts at fault: findings are stored, listed, and cited in findings of later runs."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "history": Command(
            "dpro.extensions.history.command:history",
            "List hosts that were found at fault before.",
            "Operate",
            paged=True,
        ),
    },
    options={"diagnose": "dpro.extensions.history.command:OPTIONS"},
    hooks={"diagnosed": "dpro.extensions.history.command:add_history"},
)
