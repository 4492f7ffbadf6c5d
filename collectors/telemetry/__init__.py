"""Samples of a node beside the job: GPUs, network ports, processors, memory."""
