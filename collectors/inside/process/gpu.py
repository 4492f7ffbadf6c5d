"""Which GPU this process computes on, so that samples of GPUs can be joined to it.

Nothing is asked before the job itself has started CUDA: asking would claim a GPU for this process.
"""

from __future__ import annotations

import os
from typing import Any

import torch

_UUID_CHARACTERS = 36
_INSTANCE = "MIG-"


def gpu_facts() -> dict[str, str]:
    """Name, uuid and PCI address of the current GPU; empty where they are not known, as `0000:c1:00.0`."""
    if not torch.cuda.is_initialized():
        return {"gpu_name": "", "gpu_uuid": "", "gpu_pci": ""}
    index = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    uuid = _instance(index) or str(getattr(properties, "uuid", ""))
    return {"gpu_name": properties.name, "gpu_uuid": uuid, "gpu_pci": _address(properties)}


def _instance(index: int) -> str:
    """The instance of a partitioned GPU that the environment names; CUDA may give that of the whole GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[index].strip() if index < len(visible) else ""
    return name if name.startswith(_INSTANCE) and len(name) == len(_INSTANCE) + _UUID_CHARACTERS else ""


def _address(properties: Any) -> str:
    """PyTorch 2.8 and later know it."""
    try:
        domain, bus, device = (
            int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device")
        )
    except (AttributeError, TypeError, ValueError):
        return ""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"
