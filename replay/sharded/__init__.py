"""Graphs of runs that are too large to be held at once: each rank is built and condensed by itself.

Everything that goes from a process to another can be pickled. The order of calls:

    agreed = agree(run)                                    # match collectives, align clocks
    facts = [build_share(run, agreed.of(rank), folder) for rank in agreed.ranks]   # anywhere, in any order
    pooled = pool(facts)                                   # lags, and where in steps collectives are
    skeletons = [condense_share(folder, pooled.of(rank)) for rank in agreed.ranks]     # anywhere
    joined = join_skeletons(skeletons, agreed, pooled)     # replays as the whole graph would

agreed     what ranks must know of each other before any can be built
share      the nodes and edges of one rank, and what others need to know of it
pooled     what follows from that for all ranks
skeleton   a share with only the nodes that matter
joined     the skeletons of all ranks as one graph
inside     one rank as it runs in the joined graph, in its own nodes
path       critical paths, in the nodes of the ranks that they go through
"""
