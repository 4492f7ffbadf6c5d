"""dpro: record a distributed training job, replay it, find what is slow and what would help.

Importing this package loads the standard library only; every command imports what it needs.
"""

from dpro._version import __version__

__all__ = ["__version__"]
