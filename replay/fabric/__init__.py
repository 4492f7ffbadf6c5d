"""The network of a job as flows see it.

network    a topology as arrays: nodes and links of one direction
routes     shortest paths, and the choice among equally short ones
fairness   rates of flows that share links
"""
