"""All that runs inside the job: the standard library and torch only, any Python that PyTorch runs with.

Nothing here may change the job or raise. `recorder` is the core: it says which processes record and what a
step is, and calls the probes when a step, a window, a second or the job ends. Modules beside it are what it
and the probes share; it imports no probe. An error in a probe ends that probe alone, all of its module: so
each probe is a module.
"""
