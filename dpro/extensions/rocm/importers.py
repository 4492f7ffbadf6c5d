"""Formats of AMD's profilers and the bytes that identify them; a reader is imported when a file needs it."""

from dpro.ingest.formats import Format

# SQLite lists its tables at the start of a file; rocprofv3's are named after the recording.
_TABLES = (b"rocpd_op", b"rocpd_api", b"rocpd_info_")
RPD = Format("rocmProfileData", "dpro.extensions.rocm.rpd", "read_rpd", _TABLES, "is_rpd")

_COLUMNS = (b"Start_Timestamp", b"Logical_Node_Id", b"rocprofiler-sdk-tool")
ROCPROFV3 = Format(
    "rocprofv3", "dpro.extensions.rocm.rocprofv3", "read_rocprofv3", _COLUMNS, "is_rocprofv3", streams=True
)

ROCPROF = Format(
    "rocprof",
    "dpro.extensions.rocm.rocprof",
    "read_rocprof",
    (b"KernelName", b"HSASystemAttributes"),
    "is_rocprof",
    streams=True,
)
