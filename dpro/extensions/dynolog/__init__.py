"""Profiles a job that was started without dpro, but asks a daemon whether to profile itself."""

from dpro.plugins import Extension

EXTENSION = Extension(hooks={"attach": "dpro.extensions.dynolog.profiled:profile_unrecorded"})
