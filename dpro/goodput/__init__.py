"""Where all the time of a job went, over all its attempts, and what another way of recovery would give.

attempts    the starts of a job, in order, and the step that each resumed from
marks       what each rank was doing, and from which moment on
account     each second of each rank, in one class
ends        how each attempt ended, and which attempts left no record
throughput  MFU, samples and tokens per second, in steps and over the wall time
life        all of these for one job
document    where the time went, as the answer of `dpro goodput`
recovery    predictions of other ways to save and recover
"""
