"""Accounts for all the time of a job over its attempts, and predicts the effect of other ways of recovery."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "goodput": Command(
            "dpro.extensions.goodput.command:goodput",
            "Account for a job's time across all its restarts.",
            "Operate",
            paged=True,
        ),
    },
    changes={"goodput": "dpro.extensions.goodput.outlook:DESIGNS"},
    views={"goodput": "dpro.extensions.goodput.view:VIEW"},
    figures={"life": "dpro.extensions.goodput.view:draw_life"},
    hooks={
        "goodput": "dpro.extensions.goodput.view:goodput_of",
        "report_figures": "dpro.extensions.goodput.view:figures_of_report",
    },
)
