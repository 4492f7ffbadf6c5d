"""The global dataflow graph: built from the tables of a run, replayed, judged, and changed.

graph         read-only arrays, one entry per node and edge, in topological order, validated
engine        the compiled loops: longest path, many scenarios in one pass, topological order
compiled      how loops are compiled, and their machine code kept and loaded again
archive       records of arrays and frames as one file
kept          what follows from a run alone, kept beside its saved graph
timeline      replay, step times, critical path
intervals     sets of moments in time
mesh          where each rank stands on the axes of parallelism
run_mesh      the same of a run, and along which axis each of its process groups is
peers         work of ranks by phase between collectives, and which ranks do the same
pretended     the step of a job whose ranks were pretended: what communication would take, filled in
difference    what explains that one run is slower than another
alignment/    which rows are one collective; each host's clock against the reference
construction/ from tables to a graph: rank by rank, then joined by rendezvous
pipeline/     the same graph from whole operations of pipeline-parallel jobs
steps/        durations of steps, pauses, host counters, breakdown: from tables alone, without a graph
fidelity/     how far a replay is from the trace, and how far to trust predictions
fabric/       the network as flows see it: links, paths, rates
models/       what communication, gradients, memory and matmuls cost
devices/      how long operations take on other devices and at other precisions
layouts/      a job in another layout: its step and its memory
whatif/       edits: one graph into another, and the search for what helps
"""
