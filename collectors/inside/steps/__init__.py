"""Probes and core of steps: where each ends, how long it took on the device, what the process did in it."""
