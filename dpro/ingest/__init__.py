"""Importers: other tools' traces into the tables of `dpro.schema`.

`importer` walks the sources, `formats` recognises the format of a file by its content (dpro's own formats,
then entry points of other distributions), and one importer per format reads it into one or several ranks.
Files are tasks: they run in a pool, on any executor, or in shards, and the same input gives the same bytes.

    importer            sources to a run, in one process or a pool
    shards              the same by several processes that share a file system, such as a Slurm array
    stored              a run in an object store, whole or by shards that share only the store
    dumps               a folder of flight recorder dumps as tables in memory, without making a run
    formats             which importer reads a file
    trace               what an importer returns
    parallel, ray_executor  tasks in a pool of processes, or on a Ray cluster
    assembly/           staged files, the files of one rank merged, the run put in place
    reading/            bytes of files and archives within limits; loosely typed values as columns want them
    derived/            what several formats leave to be inferred: steps, and which call launched a kernel
    kineto/             torch.profiler traces, read in chunks as far as they go
    execution_trace/    PyTorch and Chakra execution traces, linked to their Kineto twin
    nsys/               Nsight Systems databases
    nccl/               logs of NCCL's Inspector, reports of its RAS service
    flight_recorder/    PyTorch's ring of recent collectives
    pipelines/          operation-level tables, pipeline timelines
"""
