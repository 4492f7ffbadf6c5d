"""Links, ports, hosts and parts of the network that move data slower than comparable ones, or than before.

traffic       what was moved, from a graph
timed_calls   the same from calls and sends that were timed without a window
transfers     groups that do the same compared, and what the slow ones have in common
fabric        parts of the network between which all is slow
wires         cables, ports and switches on the paths of slow groups, where the run has a topology
tomography    the votes of flows over what they cross
losses        what loses packets, by what TCP sends again
degradation   transfers that became slower than they were
host_waits    hosts that became communication-bound, from their counters alone
axes          along which axis of parallelism slow transfers are
pairs         what each pair of ranks takes, as a matrix
"""
