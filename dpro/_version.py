"""The version, in a separate module, so that packaging can read it without importing anything."""

__version__ = "0.1.0"
