"""What the errors mean that GPUs report: XIDs of NVIDIA's driver, events of AMD's, GPUs that are lost.

The meanings are those of "Analyzing Xid Errors with the Xid Catalog" in NVIDIA's GPU deployment and
management documentation (docs.nvidia.com/deploy/xid-errors), in other words.
"""

from __future__ import annotations

from typing import NamedTuple


class Error(NamedTuple):
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
    13: Error("exception in the graphics or compute engine, as by an access out of bounds", EITHER),
    31: Error("GPU memory page fault: a kernel used an illegal address", PROGRAM),
    32: Error("invalid or corrupted stream of commands to the GPU", EITHER),
    43: Error("the GPU stopped processing the program's work after a fault of the program", PROGRAM),
    44: Error("the graphics engine failed at a switch of contexts", EITHER),
    45: Error("channels were torn down after an earlier error, or because the process was ended", AFTER),
    46: Error("the GPU stopped processing", EITHER),
    48: Error("uncorrectable (double-bit) ECC error in the GPU's memory", HARDWARE),
    61: Error("the GPU's micro-controller stopped at a breakpoint", HARDWARE),
    62: Error("the GPU's micro-controller halted", HARDWARE),
    63: Error("a row of memory was set aside after errors, to be remapped at the next reset", HARDWARE),
    64: Error("a failing row of memory could not be set aside", HARDWARE),
    69: Error("the graphics engine met an illegal class or method", EITHER),
    74: Error("NVLink error: a link of the GPU, or what is at its other end", HARDWARE),
    79: Error("the GPU has fallen off the bus", HARDWARE),
    92: Error("a high rate of corrected (single-bit) ECC errors", HARDWARE),
    93: Error("the GPU's configuration memory was written too often", HARDWARE),
    94: Error("uncorrectable ECC error, contained: only the program that used the memory is lost", HARDWARE),
    95: Error("uncorrectable ECC error, not contained: all programs on the GPU are affected", HARDWARE),
    109: Error("a switch of contexts took too long", EITHER),
    110: Error("security fault of the GPU", HARDWARE),
    119: Error("the GPU's system processor (GSP) did not answer the driver in time", HARDWARE),
    120: Error("error in the GPU's system processor (GSP)", HARDWARE),
    121: Error("corrected error of the link between CPU and GPU (NVLink-C2C)", HARDWARE),
    122: Error("the GPU's firmware memory could not be read", HARDWARE),
    123: Error("the GPU's firmware memory could not be written", HARDWARE),
    124: Error("the GPU's firmware memory could not be erased", HARDWARE),
    125: Error("the file system of the GPU's configuration memory is damaged", HARDWARE),
    136: Error("a link could not be trained", HARDWARE),
    137: Error("illegal access to a peer's memory over NVLink", PROGRAM),
    140: Error("ECC error from which the driver did not recover", HARDWARE),
    143: Error("the GPU could not be initialised", HARDWARE),
    **dict.fromkeys(range(144, 151), Error("NVLink error, of the fifth generation", HARDWARE)),
    154: Error("the driver changed what it takes to recover the GPU (reset or reboot)", AFTER),
    155: Error("NVLink error that the driver's software defines", EITHER),
    156: Error("a resource of the GPU was retired", HARDWARE),
    157: Error("a resource of the GPU could not be retired", HARDWARE),
    158: Error("fatal timeout of the GPU", HARDWARE),
}
LOST = Error("the driver lost the GPU", HARDWARE)
# Events of AMD's driver, by their counters.
EVENTS = {
    "event_vm_fault": Error("GPU memory page fault: a kernel used an illegal address", PROGRAM),
    "event_gpu_reset": Error("the driver reset the GPU", EITHER),
    "event_thermal_throttle": Error("the GPU was throttled for heat", HARDWARE),
}
_UNKNOWN = Error("not in the table here: see NVIDIA's Xid catalog", EITHER)
_OF_MEMORY = (63, 92)


def error_of(counter: str, number: int) -> Error:
    """Return what an event means.

    Args:
        counter: of the event: `xid`, `lost`, or one of `EVENTS`.
        number: its value: the number of an XID.
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
