"""Arguments of DistributedDataParallel.

In: `bucket_cap_mb`, `gradient_as_bucket_view`, `static_graph` or `find_unused_parameters`. Out: modules
that are wrapped with them. With a cap of its own the first bucket is no smaller than the others, as PyTorch
has it.
"""

from __future__ import annotations

from typing import Any

from ..recorder import Recorder
from .arguments import Bound, set_arguments
from .report import ChangeReport


def install(report: ChangeReport, recorder: Recorder, arguments: dict[str, Any]) -> None:
    """Change how modules are wrapped."""
    from torch.nn.parallel import DistributedDataParallel

    report.missing = "the job wrapped no module with DistributedDataParallel"

    def also(bound: Bound) -> dict[str, Any]:
        listed = "bucket_cap_mb" in arguments and bound.arguments.get("bucket_cap_mb_list") is not None
        return {"bucket_cap_mb_list": None} if listed else {}

    set_arguments(report, [DistributedDataParallel], arguments, also)
