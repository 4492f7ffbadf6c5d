"""Matching of collectives across ranks, and alignment of their clocks."""
