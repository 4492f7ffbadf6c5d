"""Diagnosis while a job runs.

The one part where recording, importing and detecting meet outside the commands: what is new is read from the
recorder's own files, and the detectors see small tables of it.

    watcher    the loop: reads what is new, and lets three watches look at it
    job        the processes that train, and whether the job moves
    tail       what one process has recorded since the last look: steps and the latest records
    hang       the hang watch: how long to be patient, when to ask for calls, when to search them
    late       the late watch: own times of steps, computed once and remembered
    deep       the deep watch: the latest deep windows, in a process of its own
    calls      the latest calls of all processes, as numbers in one table, for the late watch
    life       where the time of the job has gone so far
    snapshot   the latest dumps of all processes, each read once, for the hang watch
    activity   whether a process that others wait for works
    evidence   errors of GPUs, dumps and stacks of a hang; the findings log of the run
    outlets    webhook, Prometheus
    hook       a command that is run when a finding names a host
    recipes/   such commands, for Slurm, torchrun and Kubernetes

A watch has a state, a small record, and a function from a state and what is known to the next state.
"""
