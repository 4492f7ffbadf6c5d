"""A graph with only the nodes that ranks wait for each other at, which replays exactly as the whole does.

parts      where a graph falls apart into ranks, and which nodes have to stay
skeletons  ranks with only the nodes that matter
kernels    the compiled loops
joined     the skeletons of all ranks as one graph
inside     what happens inside a rank, found again where someone looks
"""
