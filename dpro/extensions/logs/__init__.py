"""Jobs that were not recorded: how they ended, by their logs, for `dpro diagnose job.log…`."""

from dpro.plugins import Extension

EXTENSION = Extension(hooks={"logs": "dpro.extensions.logs.diagnose:diagnose_paths"})
