"""Measured operations of one device, software, kind and precision: a `DeviceTable`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.replay.devices.fitting import DeviceSample
from dpro.replay.models.roofline import GPUS, model_named

# Names in such tables that are no names of products.
DEVICES = {
    "a100_sxm": "A100-SXM4-80GB",
    "a100_pcie": "A100 80GB PCIe",
    "h100_pcie": "H100 PCIe",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell Server Edition",
}
# Products in block-scaled fp8 (fp8_block) are left out: those kernels quantise, too, and differ between
# libraries by tens of microseconds.
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8"}


@dataclass(frozen=True)
class DeviceTable:
    """Operations that were measured on one device, with one software.

    Attributes:
        device: a key of `gpus.GPUS`.
        software: library and kernel that ran them, with the precision as its makers call it.
        kind: of the operations.
        dtype: a key of `roofline.BYTES`.
        shapes: [N] what two tables must have in common for the same operation.
        operations: [N] rows as `operations.COLUMNS` has them.
        us: [N] measured.
    """

    device: str
    software: str
    kind: str
    dtype: str
    shapes: pl.DataFrame
    operations: pl.DataFrame
    us: Floats

    @property
    def library(self) -> str:
        """Whose kernels, at which precision: what tables of two devices have in common."""
        whose, *rest = self.software.split("/")
        return "/".join((whose, *rest[1:]))

    def sample(self) -> DeviceSample:
        """Its operations, to fit."""
        return DeviceSample(self.operations, self.us, GPUS[self.device], self.dtype)

    def rows(self, mask: Bools | Ints) -> DeviceTable:
        """Some of its rows.

        Args:
            mask: [N] which; or their numbers.
        """
        at = np.flatnonzero(mask) if mask.dtype == np.bool_ else mask
        return DeviceTable(
            *(self.device, self.software, self.kind, self.dtype),
            *(self.shapes[at], self.operations[at], self.us[at]),
        )


def device_named(name: str) -> str:
    """The key of `gpus.GPUS` for a device of a table, such as `h100_sxm`; empty where it is not known."""
    plain = name.replace("_", " ").upper()
    return DEVICES.get(name, "") or model_named(plain.removesuffix(" SXM")) or model_named(plain)
