"""Detectors: tables and graph in, findings out; no printing, no plotting.

findings            what a detector says: class, component, cost, confidence, evidence
findings_log        what a watcher found while the job ran, as the run keeps it
run                 all detectors: what each needs, and what suppresses its findings
live                the same on a job that runs
context             what the detectors of one run share: tables, graph, own times, pauses
baseline            the unchanged graph: its replay, its steps, the work of its ranks, waits in collectives
significance        whether a gain per step is large, persistent and beyond chance
stragglers/         ranks that the others wait for, by replay and by calls alone; input-bound jobs
imbalance/          uneven work: by data, by pipeline stage, by micro-batch
network/            slow links, ports, hosts and parts of the network
machine/            hosts without free cores, idle GPUs, clocks held down, errors of GPUs
hang/               what a job that stands still waits for
pauses/             time that is lost in some steps only
pipeline_slowdown   jobs of whole operations against their ideal: workers, stages, kinds of work
regression          since when a job is slower, and what else changed then
change_points       where the level of a series changes
notes               waiting that costs nothing
"""
