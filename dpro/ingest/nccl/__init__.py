"""What NCCL itself writes: logs of its Inspector plug-in, reports of its RAS service."""
