"""The network of a job as flows see it.

network      a topology as arrays: nodes and links of one direction
routes       shortest paths, and the choice among equally short ones
placement    which GPU each rank computes on, and what ranks exchange
channels     rings and trees of groups of ranks, where they were recorded
flows        what communication puts on links
connections  flows that routers send one way, and known paths of them
crossing     which links flows may cross, and how likely
seeds        what hashes load that are not known
planning     paths that are chosen ahead, so that flows meet least
fairness     rates of what shares links, and when it ends
usage        how much links carry, and which connections meet on them
"""
