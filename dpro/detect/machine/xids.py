"""What the errors mean that GPUs report: XIDs of NVIDIA's driver, events of AMD's, GPUs that are lost.

The meanings are those of "Analyzing Xid Errors with the Xid Catalog" in NVIDIA's GPU deployment and
management documentation (docs.nvidia.com/deploy/xid-errors), in other words.
"""

from __future__ import annotations

from typing import NamedTuple


class GpuError(NamedTuple):
    """An error that a GPU reports.

    Attributes:
        means: what happened, in a phrase.
        of: what is usually at fault: `PROGRAM`, `HARDWARE`, `EITHER`, or `AFTER` another error.
    """

    means: str
    of: str


PROGRAM, HARDWARE, EITHER, AFTER = "the program", "the hardware", "either", "another error"
DO = {
    PROGRAM: "look for an illegal access in the job's kernels (`compute-sanitizer`)",
    HARDWARE: "drain the host, reset the GPU, and replace it if the error comes again",
    EITHER: "reset the GPU, run DCGM's diagnostics (`dcgmi diag -r 3`), and see whether the error follows "
    "the job or the GPU",
    AFTER: "look for the error before it",
}
_MEMORY = "reset the GPU between jobs; several of them on one GPU are reason to replace it"

XIDS = {
    13: GpuError("exception in the graphics or compute engine, as by an access out of bounds", EITHER),
    31: GpuError("GPU memory page fault: a kernel used an illegal address", PROGRAM),
    32: GpuError("invalid or corrupted stream of commands to the GPU", EITHER),
    43: GpuError("the GPU stopped processing the program's work after a fault of the program", PROGRAM),
    44: GpuError("the graphics engine failed at a switch of contexts", EITHER),
    45: GpuError("channels were torn down after an earlier error, or because the process was ended", AFTER),
    46: GpuError("the GPU stopped processing", EITHER),
    48: GpuError("uncorrectable (double-bit) ECC error in the GPU's memory", HARDWARE),
    61: GpuError("the GPU's micro-controller stopped at a breakpoint", HARDWARE),
    62: GpuError("the GPU's micro-controller halted", HARDWARE),
    63: GpuError("a row of memory was set aside after errors, to be remapped at the next reset", HARDWARE),
    64: GpuError("a failing row of memory could not be set aside", HARDWARE),
    69: GpuError("the graphics engine met an illegal class or method", EITHER),
    74: GpuError("NVLink error: a link of the GPU, or what is at its other end", HARDWARE),
    79: GpuError("the GPU has fallen off the bus", HARDWARE),
    92: GpuError("a high rate of corrected (single-bit) ECC errors", HARDWARE),
    93: GpuError("the GPU's configuration memory was written too often", HARDWARE),
    94: GpuError(
        "uncorrectable ECC error, contained: only the program that used the memory is lost", HARDWARE
    ),
    95: GpuError("uncorrectable ECC error, not contained: all programs on the GPU are affected", HARDWARE),
    109: GpuError("a switch of contexts took too long", EITHER),
    110: GpuError("security fault of the GPU", HARDWARE),
    119: GpuError("the GPU's system processor (GSP) did not answer the driver in time", HARDWARE),
    120: GpuError("error in the GPU's system processor (GSP)", HARDWARE),
    121: GpuError("corrected error of the link between CPU and GPU (NVLink-C2C)", HARDWARE),
    122: GpuError("the GPU's firmware memory could not be read", HARDWARE),
    123: GpuError("the GPU's firmware memory could not be written", HARDWARE),
    124: GpuError("the GPU's firmware memory could not be erased", HARDWARE),
    125: GpuError("the file system of the GPU's configuration memory is damaged", HARDWARE),
    136: GpuError("a link could not be trained", HARDWARE),
    137: GpuError("illegal access to a peer's memory over NVLink", PROGRAM),
    140: GpuError("ECC error from which the driver did not recover", HARDWARE),
    143: GpuError("the GPU could not be initialised", HARDWARE),
    **dict.fromkeys(range(144, 151), GpuError("NVLink error, of the fifth generation", HARDWARE)),
    154: GpuError("the driver changed what it takes to recover the GPU (reset or reboot)", AFTER),
    155: GpuError("NVLink error that the driver's software defines", EITHER),
    156: GpuError("a resource of the GPU was retired", HARDWARE),
    157: GpuError("a resource of the GPU could not be retired", HARDWARE),
    158: GpuError("fatal timeout of the GPU", HARDWARE),
}
LOST = GpuError("the driver lost the GPU", HARDWARE)
# Events of AMD's driver, by their counters.
EVENTS = {
    "event_vm_fault": GpuError("GPU memory page fault: a kernel used an illegal address", PROGRAM),
    "event_gpu_reset": GpuError("the driver reset the GPU", EITHER),
    "event_thermal_throttle": GpuError("the GPU was throttled for heat", HARDWARE),
}
_UNKNOWN = GpuError("not in the table here: see NVIDIA's Xid catalog", EITHER)
_OF_MEMORY = (63, 92)


def error_of(counter: str, number: int) -> GpuError:
    """Return what an event means.

    Args:
        counter: of the event: `xid`, `lost`, or one of `EVENTS`.
    """
    if counter == "xid":
        return XIDS.get(number, _UNKNOWN)
    return EVENTS.get(counter, LOST)


def name_of(counter: str, number: int) -> str:
    """Return an event's name: `XID 79`, `lost`, `vm fault`.

    Args:
        counter, number: as of `error_of`.
    """
    return f"XID {number}" if counter == "xid" else counter.removeprefix("event_").replace("_", " ")


def remedy_of(counter: str, number: int) -> str:
    """Return what to do about an event.

    Args:
        counter, number: as of `error_of`.
    """
    return _MEMORY if counter == "xid" and number in _OF_MEMORY else DO[error_of(counter, number).of]
