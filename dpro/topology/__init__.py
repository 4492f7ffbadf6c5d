"""The fabric that a job runs on, as `topology.toml` describes it: hosts, GPUs, ports, switches and cables."""
