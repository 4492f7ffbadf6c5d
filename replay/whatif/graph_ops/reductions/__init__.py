"""Reductions of gradients."""
