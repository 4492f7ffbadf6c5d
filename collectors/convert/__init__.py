"""From what one process recorded to the tables of a run.

recorded, readers   the processes that recorded; what reads the files of PyTorch and NCCL
process             all files of one process into Parquet parts, and notes for the manifest
tables, host_facts  records into steps, counters, clock samples and workers; totals into counters of steps
windows/            deep windows: cut to their steps, joined with calls, what they lack and cost
calls, stall        each collective call once; what a process waited for when no step ended, and messages
work/               operations of pipelines, iterations and requests of servers
pretended           calls of pretended ranks
meshes              axes of device meshes into coordinates
endings             how a process ended, from all that saw it
inspector_logs      logs of NCCL's Inspector
"""
