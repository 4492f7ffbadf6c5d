"""Probes of steps: what ends them, how long they took on the device, what the process did in them."""
