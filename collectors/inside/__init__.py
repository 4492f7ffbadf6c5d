"""Code that runs inside the job: the standard library and torch only, on any Python that PyTorch supports.

Nothing here may change the job or raise. `recorder` is the core: it decides which processes record and what a
step is, and calls the probes when a step, a window, a second or the job ends. The core and the probes share
the modules beside it, which import no probe. An error in a probe stops all of its module and nothing else:
so each probe is a module.
"""
