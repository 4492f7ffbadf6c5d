"""A graph with only the nodes that ranks wait for each other at, which replays exactly as the whole does.

parts         where a graph falls apart into ranks, and which nodes have to stay
skeletons     ranks with only the nodes that matter
kernels       the compiled loops
joined        the skeletons of all ranks as one graph
alternatives  one rank changed at a time, without a copy of the whole for each
"""
