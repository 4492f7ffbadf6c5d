"""Inference servers: their requests, served again by the engine as it is or as it would be."""
