"""How often `dpro diagnose` is right, beside the truth that was injected.

__main__        slow and healthy jobs, simulated and real: matrix, healthy, smallest, latency, injected
cases           the drawn jobs and faults, and whether a recording shows the fault
matrix          the command on those jobs, and the verdict
live            simulated jobs, as the watcher sees them
injected        real jobs with a slow rank
rules           simpler rules and another tool on the same recordings
report          tables of the verdicts
hangs           simulated jobs that hang, beside PyTorch's own analyser
hang_jobs       real jobs that hang
operations      operation-level traces of pipeline jobs
healing         seconds and memory per rank of healing one rank after the other
dumps, large    seconds and memory of `dpro diagnose` on dumps of many ranks, and on large recordings
"""
