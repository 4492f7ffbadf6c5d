"""The fabric of a job, described in `topology.toml`: hosts, GPUs, ports, switches and cables."""
