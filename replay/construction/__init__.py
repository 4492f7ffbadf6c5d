"""From the tables of a run to one global graph: rank by rank, then joined by their collectives.

graph_builder      all ranks' graphs, one rendezvous per collective
rank_graph         one rank's nodes and edges
rank_view          one rank in one window as arrays
cpu_threads        a CPU thread: the innermost span at each moment, waits cut out
cpu_waits          which threads matter, hand-overs between them, waits for CPU collectives
gpu_streams        GPU streams: order, events (recorded or inferred), calls that wait for the GPU
data_dependencies  what execution traces and autograd say of which work needs which
dependencies       dependencies between moments and work, and how they become edges
phases             where in a step a rank stands, counted in its own collectives
progress           how far the building has come
lags               how long after its dependencies work begins, pooled over ranks
"""
