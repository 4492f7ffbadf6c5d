"""Runs and traces at URLs, at any that fsspec supports: read through a copy, and written by imports."""

from dpro.plugins import Extension

EXTENSION = Extension(
    hooks={
        "copied": "dpro.extensions.remote.copies:copy_once",
        "stored": "dpro.extensions.remote.imports:import_to_store",
    }
)
