"""SQL queries on a run, which can read only its tables."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "query": Command(
            "dpro.extensions.query.command:query",
            "Query the tables of a run with SQL.",
            "Answer",
            paged=True,
        ),
    },
    views={"query": "dpro.extensions.query.view:VIEW"},
)
