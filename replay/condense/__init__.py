"""A graph with only the nodes at which ranks wait for each other; it replays exactly as the whole graph.

parts         how a graph is cut into ranks, and which nodes have to stay
skeletons     the nodes that stay of each rank, and the longest paths between them
kernels       the compiled loops
joined        the skeletons of all ranks as one graph
alternatives  many graphs, in each of which other ranks are changed, from two condensed ones
"""
