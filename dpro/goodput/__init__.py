"""Where all the time of a job went, over all its attempts, and what other designs of recovery would give.

attempts    the starts of a job, in order, and the step that each resumed from
marks       what each rank was doing from which moment on
account     every second of every rank in one class
ends        how each attempt ended, and what left no record
throughput  MFU, samples and tokens per second, in steps and over the wall time
document    where the time went, as the answer of `dpro goodput`
stages      how long each stage took, and how often the job failed
simulate    what a job gets done if it fails and recovers
designs     changes to how it saves and recovers
degraded    how long a step takes while a host is missing, by a replay
rates       how often it fails: its own, a log, what others have published
predict     what changes would give
outlook     predictions, as a part of the answer
"""
