"""Probes of clocks."""
