"""Analyses inference servers: latency and throughput by requests and iterations, and predicted changes."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "serving": Command(
            "dpro.extensions.serving.command:serving",
            "Break down an inference server's latency and throughput.",
            "Answer",
            paged=True,
        ),
    },
    options={
        "record": "dpro.extensions.serving.logged:OF_RECORD",
        "import": "dpro.extensions.serving.logged:OF_IMPORT",
    },
    changes={"serving": "dpro.extensions.serving.changes:CHANGES"},
    views={"serving": "dpro.extensions.serving.view:VIEW"},
    probes={"serving": "dpro.extensions.serving.inside"},
    hooks={
        "record": "dpro.extensions.serving.logged:note_logs",
        "recorded": "dpro.extensions.serving.recorded:add_logged_requests",
        "import": "dpro.extensions.serving.logged:read_logs",
        "passed_over": "dpro.extensions.serving.logged:name_log",
        "answered": "dpro.extensions.serving.answers:with_server",
        "printed": "dpro.extensions.serving.command:print_serving_of",
        "sent": "dpro.extensions.serving.answers:sent_with_server",
        "report_figures": "dpro.extensions.serving.view:figures_of_report",
    },
    needs=("plan",),
)
