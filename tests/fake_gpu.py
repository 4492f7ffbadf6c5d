"""A GPU that is behind its host, for real jobs on machines without one: goes before the job's own lines.

`train_step()` hands it one step's work; it has done all but the latest `gpu.lag` steps. Synchronising it is
refused, and said on stdout. Kineto records the CPU only.
"""

FAKE_GPU = """
import types
import torch.autograd.profiler

gpu = types.SimpleNamespace(lag=0, issued=0, capturing=False)

class Event:
    def __init__(self, **_):
        pass
    def record(self, stream):
        assert stream == "stream" and not gpu.capturing, "recorded while capturing"
        self.at = gpu.issued
    def query(self):
        assert not gpu.capturing, "asked while capturing"
        return gpu.issued - gpu.lag >= self.at

def synchronize(*_):
    print("synchronised")
    raise RuntimeError("the device would be synchronised")

torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = synchronize
torch.cuda.Event = Event
torch.cuda.current_stream = lambda *_: "stream"
torch.cuda.current_device = lambda: 0
torch.cuda.is_current_stream_capturing = lambda: gpu.capturing
torch.cuda.memory_allocated = lambda *_: 0
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(name="Fake GPU", uuid="")

make = torch.autograd.profiler.profile.__init__
def made_with_device(self, *args, use_device=None, **kwargs):
    make(self, *args, **kwargs)
    self.use_device = use_device
torch.autograd.profiler.profile.__init__ = made_with_device

def begin(*_, **__):
    gpu.capturing = True
def end(*_):
    gpu.capturing = False
torch.cuda.CUDAGraph.__mro__[1].capture_begin = begin
torch.cuda.CUDAGraph.__mro__[1].capture_end = end

def new_graph():
    graph = object.__new__(torch.cuda.CUDAGraph)
    graph._tracker = None
    return graph

plain_step = train_step
def train_step():
    gpu.issued += 1
    plain_step()
"""
