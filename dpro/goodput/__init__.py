"""Where all the time of a job went, over all its attempts, and what other designs of recovery would give.

attempts    the starts of a job, in order, and the step that each resumed from
marks       what each rank was doing from which moment on
account     every second of every rank in one class
document    the answer of `dpro goodput`
"""
