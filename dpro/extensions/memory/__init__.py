"""GPU memory by origin at its peak, from snapshots of PyTorch's allocator."""

from dpro.plugins import Command, Extension

EXTENSION = Extension(
    commands={
        "memory": Command(
            "dpro.extensions.memory.command:memory",
            "Show what held GPU memory in a snapshot.",
            "Answer",
            paged=True,
        ),
    },
    hooks={"passed_over": "dpro.extensions.memory.snapshot:name_snapshot"},
)
