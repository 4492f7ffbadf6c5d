"""The process itself: its settings, its GPU, its threads, and how it ends.

environment, masking    which variables and words are recorded: settings, and no secrets
gpu                     which GPU the process computes on
kernel                  what names a process for good, and whether it lives
requests, stacks        probes: requests from outside; where the threads are
tracebacks              stacks of threads, as faulthandler writes them
starting                probe: how far a process has come on its way to the first step
exits, preemption       probes: how processes end; a last flush before a signal that ends the process
"""
