"""Where all the time of a job went, over all its attempts, and what another way of recovery would give."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "goodput": Command(
            "dpro.extensions.goodput.command:goodput",
            "Where all the time of a job went, over all its attempts.",
            "Operate",
            paged=True,
        ),
    },
    views={"goodput": "dpro.extensions.goodput.view:VIEW"},
    figures={"life": "dpro.extensions.goodput.view:draw_life"},
    hooks={"report_figures": "dpro.extensions.goodput.view:figures_of_report"},
)
