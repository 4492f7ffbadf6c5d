"""Reductions of gradients.

recorded            how a graph reduces gradients, and what a reduction costs
changed             gradient reductions moved, cut or joined
bucket_candidates   bucket sizes that may be best
"""
