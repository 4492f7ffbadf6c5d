"""Predictions for runs whose ranks are condensed: each rank is changed and condensed again by itself.

tables   a run as one of its ranks sees it
rank     one rank under edits
changed  edits of transfers in the joined graph, and of ranks in each rank's own
slowed   kernels whose slowdown by communication changes, since they overlap it more or less
predict  predictions of both, as of the whole graph
search   which edits are worth trying
apart    ranks one by one, and the job with some of them changed, as detectors ask
"""
