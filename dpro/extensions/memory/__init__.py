"""GPU memory: what held it at its peak, by snapshots of PyTorch's allocator."""

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
)
