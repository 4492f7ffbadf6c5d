"""Samples of a node beside the job: GPUs, network ports, processors, memory.

sampler          the process beside the sidecar that samples, one per node for the node; nvml.py, amd.py,
                 nic.py, node.py, connections.py are what it asks, gpus.py what the makers' libraries share
samples, tables  the compact file it appends to, and its rows of counters
"""
