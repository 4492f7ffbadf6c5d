"""Detectors of the state of hosts and GPUs while the job ran."""
