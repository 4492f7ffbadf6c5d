"""The edits, one module per family; `dpro.replay.whatif.registry` lists them.

selected_work    any work that is named: scaled, removed, replaced, slowed down
counted          edits for which numbers of the whole job matter, which are sums over ranks
heal             ranks, links and stages as healthy as their peers
host             launches, synchronisation and CPU time of the host
training_loop    input, garbage collection
gpu/             kernels: compilation, precision, CUDA graphs, another device
parallelism/     pipelines: schedules and stages
scaling          batch, accumulation, recomputation
replicas         number of data-parallel ranks
fabric/          paths and cables of the network, and who shares them
communication    network, algorithms, added delays
reductions       what all edits of gradient reductions share
gradients        buckets, order and compression of gradient reductions
synchronisation  when gradients and parameters are exchanged
"""
