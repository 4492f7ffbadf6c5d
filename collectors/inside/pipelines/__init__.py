"""Probes of pipelines: forward and backward of each micro-batch, seen where frameworks begin them."""
