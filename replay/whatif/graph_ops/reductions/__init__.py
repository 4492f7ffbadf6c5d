"""Reductions of gradients.

recorded            how a graph reduces gradients, and what a reduction costs
surroundings        what is linked with them: other calls, what waits, which work is before
changed             gradient reductions moved, cut or joined
bucket_candidates   bucket sizes that may be best
"""
