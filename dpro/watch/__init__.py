"""Diagnosis while a job runs.

The one part where recording, importing and detecting meet outside the commands: what is new is read from the
recorder's own files, and the detectors see small tables of it.

    watcher          when to look for what, and how long to be patient
    processes, tail  who trains, and what each has recorded since the last look: steps and the latest records
    calls            the latest calls of all processes, as numbers in one table
    late             own times of steps, computed once and remembered
    snapshot         the latest dumps of all processes, each read once, for the search for hangs
    deep             the latest deep windows, by a process of its own
    activity         whether a process that others wait for works
    gpu_errors       errors that GPUs reported, for what is said of hangs
    evidence         what is kept in the run
    outlets          webhook, Prometheus
"""
