"""The fabric that a job runs on, as `topology.toml` describes it: hosts, GPUs, ports, switches and cables.

paths           which path connections take, as a plan or probes have it
file            what the file holds: read, checked, written
hostlist        lists of names in brackets: node[001-128]
fabrics         fat trees and rail-optimised fabrics, by their size
inside          the inside of a host, from NCCL's topology XML
slurm           switches and hosts, from Slurm's topology.conf
infiniband      switches, ports and cables, from ibnetdiscover
channels        rings and trees of groups of ranks, kept with a run
nccl_log        the same of communicators, from NCCL's debug log
versioned       the JSON files that a run keeps of its network
"""
