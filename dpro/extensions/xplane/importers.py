"""How profiles of XLA's programs are recognised; what reads them is loaded when there is one."""

from dpro.ingest.formats import Format

XPLANE = Format("XPlane", "dpro.extensions.xplane.xspace", "read_xspace", (b"\n",), "is_xspace")
