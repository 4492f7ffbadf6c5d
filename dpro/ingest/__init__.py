"""Importers: other tools' traces into the tables of `dpro.schema`.

`importer` walks the sources, `formats` recognises by content what a file is (dpro's own formats, then entry
points of others), and one importer per format reads it into one or several `RankTrace`s. Ranks are tasks:
they run in a pool, on any executor, or in shards, and the same input gives the same bytes.

    importer, assemble, merge, staging  sources to a run; several files of one rank; nothing left behind on
                                        failure
    parallel, ray_executor, shards      pools, executors, shards of a Slurm array
    files, streams                      bytes of a file or of an archive's member, decompressed, in chunks,
                                        within limits
    kineto/                             torch.profiler traces, read in chunks as far as they go
    execution_trace/                    PyTorch and Chakra execution traces, linked to their Kineto twin
    nsys/                               Nsight Systems databases
    nccl/, flight_recorder, flight_entries
                                        what NCCL (Inspector, RAS) and PyTorch write about collectives
    dumps, repeated                     a folder of flight recorder dumps without making a run; which of
                                        several dumps of a rank count
    oplevel, pp_timeline                operation-level tables, pipeline timelines
    launches, steps, repetition         what several formats leave to be found: which call launched a kernel,
                                        where steps begin
    dtypes, peers, values               values as files give them, as the tables want them
"""
