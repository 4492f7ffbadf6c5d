"""The format of XLA's profiles and the bytes that identify it; its reader is imported when needed."""

from dpro.ingest.formats import Format

XPLANE = Format("XPlane", "dpro.extensions.xplane.xspace", "read_xspace", (b"\n",), "is_xspace")
