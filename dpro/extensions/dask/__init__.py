"""Divides work on large runs among the workers of a Dask cluster, on one or many machines."""

from dpro.plugins import Extension

_OPTIONS = "dpro.extensions.dask.workers:OPTIONS"

EXTENSION = Extension(
    options=dict.fromkeys(("import", "explain", "diagnose", "report", "replay", "whatif"), _OPTIONS),
    hooks={"workers": "dpro.extensions.dask.workers:workers_of_cluster"},
)
