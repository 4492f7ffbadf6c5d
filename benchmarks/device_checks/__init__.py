"""Checks of `dpro.replay.cost.kernels` on measured tables; `python benchmarks/devices.py` runs them.

figures     errors of predictions, and coverage of their intervals
shipped     fits the numbers that ship, from tables that a user has fetched
operators   matmul and attention: unseen shapes, other devices, devices that were never measured
models      whole models on another device
jobs        small jobs, which wait for their hosts, on another machine
"""
