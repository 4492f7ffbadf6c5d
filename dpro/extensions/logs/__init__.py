"""Diagnoses the end of jobs that were not recorded, from their logs: `dpro diagnose job.log…`."""

from dpro.plugins import Extension

EXTENSION = Extension(hooks={"logs": "dpro.extensions.logs.diagnose:diagnose_paths"})
