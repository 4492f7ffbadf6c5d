"""Jobs that do what recorders tend to break: small scripts, each a kind, named by what it does.

Scripts print what they see of themselves (signals that came, threads, results), so that a difference shows.
"""

from __future__ import annotations

import sys

from tests.jobs import COMPILER, TORCHRUN
from tests.odd_jobs import JOBS, WINDOWS, job

__all__ = ["JOBS"]

# Ordinary ones.

job("trains and ends", "train()", is_quick=True, steps=8)
job("raises", "train(); raise ValueError('mine')")
job("exits with a code of its own", "train(); sys.exit(7)")
job("exits at once", "train(); os._exit(3)")
job("exits with a message", "train(); sys.exit('no more')")
job("aborts", "train(); os.abort()")
job("kills itself as the kernel does without memory", "train(); os.kill(os.getpid(), signal.SIGKILL)")
job("is started by `python -c`", "train()", how="-c")
job(
    "is started by `python -m`",
    "train(); say(__name__, __spec__.name, sys.argv[1:])",
    how="-m",
    arguments=("a",),
)
job("comes on its standard input", "train()", how="stdin")
job("is a zip file", "train(); say(__file__.rpartition('/')[2])", how="zip")
job(
    "has a terminal",
    "train(); say([os.isatty(n) for n in range(3)], sys.stdout.line_buffering)",
    terminal=True,
)
job(
    "writes a gigabyte through a pipe",
    """
    train(3)
    line = b"x" * (1 << 20)
    for _ in range(1024):
        os.write(1, line)
    train(3)
    """,
    through=("sh", "-c", '"$@" | sha256sum', "sh"),
)
job(
    "writes into a pipe that no process reads any more",
    """
    train(3)
    for _ in range(100):
        print("x" * 65536)
    """,
    through=("sh", "-c", '"$@" | head -c 10', "sh"),
)

# Exceptions whose own code runs when they are looked at.

job(
    "raises what exits when it is put into words",
    """
    train()
    class Trap(Exception):
        def __str__(self):
            sys.exit(9)
        __repr__ = __str__
    def hook(kind, error, place):
        say("hook", kind.__name__)
    sys.excepthook = hook
    raise Trap(1)
    """,
)
job(
    "raises what counts how often it is put into words",
    """
    train()
    count = []
    class Counting(Exception):
        def __str__(self):
            count.append(1)
            say("words", len(count))
            return "mine"
    raise Counting
    """,
    is_quick=True,
)
job(
    "raises what is interrupted while it is put into words",
    """
    train()
    class Trap(RuntimeError):
        def __str__(self):
            raise KeyboardInterrupt
    raise Trap
    """,
)
job(
    "catches what its own batches raise",
    """
    class Trap(Exception):
        def __str__(self):
            sys.exit(9)
    class Batch(dict):
        def values(self):
            raise Trap
    loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=1, collate_fn=lambda _: Batch(a=1))
    for _ in loader:
        train_step()
    train()
    """,
)

# Objects of the job's that notice when they are touched.

job(
    "has optimizers whose groups notice being looked at",
    """
    class Watched(Descent):
        @property
        def param_groups(self):
            looks.append(sys._getframe(1).f_code.co_name)
            return self.groups
        @param_groups.setter
        def param_groups(self, value):
            self.groups = value
    looks = []
    optimizer = Watched(model.parameters())
    train()
    say(len(looks), sorted(set(looks)))
    """,
)
job(
    "has models that notice being looked at",
    """
    class Watched(torch.nn.Linear):
        def named_modules(self, *a, **k):
            say("named_modules")
            return super().named_modules(*a, **k)
        def named_parameters(self, *a, **k):
            say("named_parameters")
            return super().named_parameters(*a, **k)
        def parameters(self, *a, **k):
            say("parameters")
            return super().parameters(*a, **k)
        def named_children(self, *a, **k):
            say("named_children")
            return super().named_children(*a, **k)
        def __getattr__(self, name):
            if name not in ("weight", "bias"):
                say("getattr", name)
            return super().__getattr__(name)
    model = Watched(4, 4)
    optimizer = Descent([model.weight, model.bias])
    def slow():
        train_step()
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            model(torch.ones(2, 4))
    for _ in range(9):
        slow()
    state()
    """,
    options=(*WINDOWS, "--modules"),
)
job(
    "has batches that notice being looked at",
    """
    class Batch:
        def __getattr__(self, name):
            say("getattr", name)
            raise AttributeError(name)
        @property
        def __dict__(self):
            say("dict")
            return {}
        @property
        def __class__(self):
            say("class")
            return type(self)
    for batch in torch.utils.data.DataLoader(range(9), batch_size=None, collate_fn=lambda _: Batch()):
        train_step()
    state()
    """,
)
job(
    "has loaders with slots and traps",
    """
    class Loader(torch.utils.data.DataLoader):
        def __setattr__(self, name, value):
            seen.append(("set", name))
            super().__setattr__(name, value)
        def __getattribute__(self, name):
            seen.append(("get", name))
            return super().__getattribute__(name)
        @property
        def num_workers(self):
            seen.append(("get", "num_workers of the property"))
            return 0
        @num_workers.setter
        def num_workers(self, value):
            pass
    seen = []
    loader = Loader(torch.ones(16, 4), batch_size=2)
    for batch in loader:
        train_step()
    say(digest(seen), len(seen))
    state()
    """,
    is_quick=True,
)
job(
    "has tensors of a class of its own",
    """
    seen = []
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return super().__torch_function__(function, types, args, kwargs or {})
    def mine():
        collate = lambda rows: torch.stack(rows).as_subclass(Mine)
        for batch in torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=2, collate_fn=collate):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    mine()
    model = torch.nn.Linear(4, 4)
    model.weight = torch.nn.Parameter(torch.ones(4, 4).as_subclass(Mine))
    optimizer = Descent(model.parameters())
    mine()
    say(len(seen), digest(seen))
    for name in seen: say(name)
    state()
    """,
)
job(
    "sees all calls of torch by a function mode",
    """
    from torch.overrides import TorchFunctionMode
    seen = []
    class Log(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))
    with Log():
        for batch in torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2):
            train_step()
            with torch.profiler.record_function("mine"):
                torch.save(model.state_dict(), "saved.pt")
    for name in seen: say(name)
    state()
    """,
    is_quick=True,
)
job(
    "sees all operators by a dispatch mode",
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))
    with Log():
        for batch in torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2):
            train_step()
            with torch.profiler.record_function("mine"):
                torch.save(model.state_dict(), "saved.pt")
    for name in seen: say(name)
    state()
    """,
    is_quick=True,
)
job(
    "counts its floating-point operations",
    """
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        train()
    say(counter.get_total_flops())
    """,
)

# Resources.

job(
    "may open few files",
    """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    train()
    """,
    lines=3,
)
job(
    "has used up its descriptors",
    """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True: held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        say(error.strerror)
    train()
    """,
    lines=20,
    shows_frames=True,
    steps=0,
)
job(
    "may write small files only",
    """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    train(20)
    """,
    lines=20,
    steps=0,
)
job(
    "may write small files only and hears of those that are too large",
    """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    seen = []
    signal.signal(signal.SIGXFSZ, lambda *_: seen.append("too large"))
    train(20)
    say(seen)
    """,
    lines=20,
    steps=0,
)
job(
    "limits its files once it trains",
    """
    import resource
    seen = []
    train(5)
    signal.signal(signal.SIGXFSZ, lambda *_: seen.append("too large"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    train(20)
    say(seen)
    """,
    lines=20,
)
job(
    "limits its memory",
    """
    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    train()
    """,
    lines=20,
    steps=0,
)
job("empties its environment", "os.environ.clear(); train()", lines=1)
job("works in another folder", "os.mkdir('other'); os.chdir('other'); train(); torch.save(model, 'saved.pt')")
job("works in a folder that is gone", "os.mkdir('other'); os.chdir('other'); os.rmdir('../other'); train()")
job(
    "deletes the folder of its recording",
    """
    import shutil
    train(4)
    for entry in sys.path:
        if "launch=" in entry:
            from urllib.parse import unquote
            shutil.rmtree(os.path.dirname(os.path.dirname(unquote(entry.partition("launch=")[2]))))
    train(9)
    """,
    lines=20,
    steps=0,
)
job(
    "changes its root",
    """
    os.mkdir("root")
    train(4)
    os.chroot("root")
    os.chdir("/")
    train(9)
    """,
    as_root=True,
    lines=20,
)
job(
    "gives up its rights",
    """
    train(4)
    os.setgid(65534); os.setuid(65534)
    train(9)
    """,
    as_root=True,
    lines=20,
)

# Surroundings that leave no room.

NAMESPACE = ("unshare", "-m", "sh", "-c")
MOUNTED = 'mkdir -p {PLACE} && mount -t tmpfs -o %s tmpfs {PLACE} && PLACE={PLACE} exec "$@"'
job("has a search path that leaves no room for another word", "train(); say(len(os.environ['PYTHONPATH']))",
    variables=(("LONG_PATH", "131000"),), steps=0,
    says="dpro: the environment has no room for the recorder")  # fmt: skip
job("has a search path that is long", "train(); say(len(os.environ['X']))", variables=(("X", "x" * 100_000),))
job("may write small files only, from the start", "train()",
    through=("sh", "-c", 'ulimit -f 8; exec "$@"', "sh"), lines=20, steps=0)  # fmt: skip
job("is recorded onto a disk that is full", "train(20)", as_root=True, lines=20, steps=0, through=(
    *NAMESPACE, MOUNTED % 'size=400k', "sh"))  # fmt: skip
job("is recorded where no more files can be made", "train(20)", as_root=True, lines=20, steps=0, through=(
    *NAMESPACE, MOUNTED % 'size=100m,nr_inodes=16', "sh",
    ))  # fmt: skip
job("has no /proc", "train()", as_root=True, lines=20, steps=0, through=(
    *NAMESPACE, 'umount -l /proc && exec "$@"', "sh"))  # fmt: skip
job(
    "loses /proc while it trains",
    """
    train(4)
    import subprocess
    subprocess.run(["umount", "-l", "/proc"], check=True)
    train(9)
    """,
    as_root=True,
    lines=20,
    through=(*NAMESPACE, 'exec "$@"', "sh"),
)
job("is recorded into a folder whose name has a new line", "train()", run_name="a\nb c")
job("fills the disk of its recording", """
    train(4)
    import errno
    with open(os.environ["PLACE"] + "/mine", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(1 << 16))
        except OSError as error:
            say(errno.errorcode[error.errno])
    train(9)
    """, as_root=True, lines=20, steps=0, through=(
    *NAMESPACE, MOUNTED % 'size=4m', "sh",
    ))  # fmt: skip

# The standard library, replaced or watched.

job(
    "freezes its clocks",
    """
    calls = []
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep",
                 "process_time_ns", "clock_gettime_ns"):
        setattr(time, name, lambda *_, name=name: calls.append(name) or 5)
    for batch in torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2):
        train_step()
    state()
    say(calls)
    """,
    is_quick=True,
)
job(
    "has its time frozen by freezegun",
    """
    import freezegun
    freezegun.configure(extend_ignore_list=["torch", "numpy", "sympy"])
    with freezegun.freeze_time("2020-01-01") as frozen:
        train()
        say(time.time(), time.time_ns())
    train(4)
    """,
    needs=("freezegun",),
)
job(
    "replaces `open`, `os.open` and `json.dumps`",
    """
    import builtins, io, json
    calls = []
    replaced = [(os, name) for name in ("open", "write", "replace", "getpid", "close")]
    for owner, name in (*replaced, (builtins, "open"), (json, "dumps"), (os.path, "abspath")):
        original = getattr(owner, name)
        def counted(*a, name=name, original=original, **k):
            calls.append((name, sys._getframe(1).f_code.co_filename.rpartition("/")[2]))
            return original(*a, **k)
        setattr(owner, name, counted)
    for batch in torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2):
        train_step()
    torch.save(model.state_dict(), "saved.pt")
    say(sorted(set(calls)))
    state()
    """,
)
job(
    "replaces `json.dumps` by one that returns bytes",
    """
    import json
    json.dumps = lambda value, **_: repr(value).encode()
    train()
    """,
)
job(
    "traces its own calls",
    """
    calls = []
    def tracer(frame, event, arg):
        if frame.f_code.co_filename == __file__:
            calls.append((frame.f_code.co_name, event, frame.f_lineno))
        return tracer
    sys.settrace(tracer)
    train()
    say(sys.gettrace() is tracer)
    sys.settrace(None)
    say(len(calls), digest(calls))
    """,
)
job(
    "profiles its own calls",
    """
    calls = []
    def profiler(frame, event, arg):
        if frame.f_code.co_filename == __file__:
            calls.append((frame.f_code.co_name, event, getattr(arg, "__name__", "")))
    sys.setprofile(profiler)
    train()
    say(sys.getprofile() is profiler)
    sys.setprofile(None)
    say(len(calls), digest(calls))
    """,
)
job(
    "is profiled by cProfile",
    """
    import cProfile, pstats
    profiler = cProfile.Profile()
    profiler.enable()
    train()
    profiler.disable()
    rows = pstats.Stats(profiler).stats
    say(sorted((name, row[0]) for (file, line, name), row in rows.items() if file == __file__))
    """,
)
job("turns warnings into errors", "import warnings; warnings.simplefilter('error'); train()")
job(
    "records all warnings",
    """
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2):
            train_step()
        torch.save(model, "saved.pt")
        torch.load("saved.pt", weights_only=False)
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 2).sum().backward(create_graph=True)
    say([(str(w.message)[:60], os.path.basename(w.filename)) for w in caught])
    state()
    """,
)
job(
    "warns where it calls",
    """
    import warnings
    import torch.distributed.checkpoint as dcp
    dcp.save({"model": model.state_dict()}, checkpoint_id="saved")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.step()
    torch.nn.functional.mse_loss(torch.ones(2), torch.ones(2, 1))
    train()
    """,
    shows_frames=True,
)
job(
    "allows shallow recursion only",
    """
    def deep(n):
        return 0 if n == 0 else 1 + deep(n - 1)
    depths = []
    for limit in (60, 80, 100):
        sys.setrecursionlimit(limit)
        try:
            train_step()
            depths.append("trained")
        except RecursionError:
            depths.append("too deep")
    sys.setrecursionlimit(1000)
    say(depths[-1])
    """,
    lines=20,
    steps=0,
)
job(
    "recurses deeply in hooks of its backward",
    """
    def deep(n):
        return 0 if n == 0 else 1 + deep(n - 1)
    def hook(gradient):
        try:
            deep(10 ** 6)
        except RecursionError:
            seen.append("too deep")
    seen = []
    model.weight.register_hook(hook)
    train()
    say(seen)
    """,
)
job(
    "forgets its modules",
    steps=0,
    body="""
    for name in list(sys.modules):
        if not name.startswith(("torch", "builtins", "sys", "importlib", "_frozen", "numpy")):
            del sys.modules[name]
    train()
    """,
    lines=20,
)
job(
    "imports modules of its own that look at themselves, fail and import each other",
    """
    import importlib, importlib.util, pathlib, pickle, traceback
    pathlib.Path("mine.py").write_text("import copy, yours\\nprint(copy.copy(__spec__) == __spec__)")
    pathlib.Path("yours.py").write_text("import mine\\nprint(type(__spec__).__name__)")
    pathlib.Path("theirs.py").write_text("import yours\\nraise ValueError('theirs')")
    sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    import mine
    for name in ("theirs", "none_such", "mine.none_such"):
        try:
            importlib.import_module(name)
        except Exception:
            say(traceback.format_exc())
        say(name in sys.modules)
    specs = [importlib.util.find_spec("theirs"), mine.__spec__, importlib.reload(mine).__spec__]
    say([type(spec) is importlib.machinery.ModuleSpec for spec in specs])
    say([pickle.loads(pickle.dumps(type(spec))) for spec in specs])
    train()
    import theirs
    """,
    is_quick=True,
)
job(
    "reloads parts of torch",
    """
    import importlib
    importlib.reload(torch.utils.data.dataloader)
    importlib.reload(torch.autograd.profiler)
    train()
    """,
)
job(
    "clears the callbacks of the collector",
    "import gc; gc.callbacks.clear(); train(); gc.collect(); train(3)",
)
job(
    "freezes the collector and looks at all objects",
    """
    import gc
    gc.freeze()
    train()
    touched = 0
    for value in gc.get_objects():
        touched += type(value).__name__ == "Linear"
        getattr(value, "no_such_attribute", None)
        try:
            bool(value)
        except Exception:
            pass
    say(touched)
    gc.unfreeze()
    train(3)
    """,
    noisy=True,
)
job(
    "debugs the collector",
    """
    import gc
    train()
    gc.collect()
    say(gc.get_threshold(), gc.isenabled(), len(gc.garbage))
    """,
)
job(
    "sees what its objects are referred by",
    """
    import gc
    train()
    gc.collect()
    for value in (model, optimizer):
        say(sorted(type(r).__name__ for r in gc.get_referrers(value)))
    say(sys.getrefcount(model), sys.getrefcount(optimizer), sys.getrefcount(model.weight))
    """,
)
job(
    "waits until its model is gone",
    """
    import gc, weakref
    train()
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    say([reference() is None for reference in gone])
    """,
)

# What others do with functions and classes of torch.

job(
    "compares functions of torch",
    """
    from torch.autograd import backward
    from torch.utils.data import DataLoader
    import inspect
    say(torch.autograd.backward is backward, torch.save is torch.serialization.save)
    say(DataLoader is torch.utils.data.dataloader.DataLoader)
    dist, module = torch.distributed, torch.nn.Module
    for function in (torch.autograd.backward, torch.save, torch.load, module.eval, module.train,
                     module.__call__, DataLoader.__iter__, torch.amp.GradScaler.step,
                     torch.no_grad.__enter__, os.execv, os._exit,
                     torch.autograd.profiler.record_function.__exit__, torch.optim.Optimizer.step,
                     torch.cuda.CUDAGraph.capture_begin, dist.init_process_group, dist.new_group,
                     dist.ProcessGroup.send):
        try:
            signature = str(inspect.signature(function))
        except (ValueError, TypeError) as error:
            signature = "none"
        said = function.__name__, function.__qualname__, function.__module__, signature
        say(*said, digest(function.__doc__))
    train()
    """,
)
job(
    "pickles functions and classes of torch",
    """
    import pickle
    for value in (torch.autograd.backward, torch.save, torch.utils.data.DataLoader, torch.no_grad,
                  torch.distributed.init_process_group,
                  torch.nn.Module.eval, torch.amp.GradScaler, os._exit, os.execv, torch.optim.Optimizer):
        say(pickle.loads(pickle.dumps(value)) is value, digest(pickle.dumps(value)))
    train()
    """,
)
job(
    "copies and pickles its model, loader and optimizer while it trains",
    """
    import copy, pickle, io
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2)
    def train_step():
        optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
    for batch in loader:
        train_step()
        for value in (model, loader, optimizer):
            copied = copy.deepcopy(value)
            say(type(copied).__name__, sorted(vars(copied)), sorted(vars(value)), len(pickle.dumps(value)))
    torch.save(model, "model.pt"); torch.save(optimizer, "optimizer.pt")
    torch.save(optimizer.state_dict(), "state.pt")
    again = torch.load("model.pt", weights_only=False)
    say(digest(again.weight.tolist()))
    state()
    """,
)
job(
    "compiles a step",
    """
    @torch.compile(backend="eager")
    def forward(x):
        return model(x).sum()
    for _ in range(9):
        optimizer.zero_grad()
        forward(torch.ones(2, 4)).backward()
        optimizer.step()
    from torch._dynamo.utils import counters
    say(dict(counters["stats"]), dict(counters["graph_break"]))
    state()
    """,
    modules=(COMPILER,),
)
job(
    "compiles a step with its backward and update",
    """
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    @torch.compile(backend="eager")
    def step(x):
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
        optimizer.step()
        model.eval(); model.train()
    for _ in range(9):
        step(torch.ones(2, 4))
    from torch._dynamo.utils import counters
    say(dict(counters["stats"]))
    state()
    """,
    modules=(COMPILER,),
)
job(
    "compiles whole graphs only",
    """
    @torch.compile(backend="eager", fullgraph=True)
    def forward(x):
        with torch.no_grad():
            y = model(x)
        with torch.profiler.record_function("mine"):
            return model(x).sum() + y.sum()
    for _ in range(9):
        optimizer.zero_grad()
        forward(torch.ones(2, 4)).backward()
        optimizer.step()
    state()
    """,
    modules=(COMPILER,),
)
job(
    "is scripted",
    """
    import warnings; warnings.simplefilter("ignore")
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
        def forward(self, x):
            with torch.autograd.profiler.record_function("mine"):
                return self.inner(x)
    model = torch.jit.script(Net())
    optimizer = Descent(model.parameters())
    train()
    model.eval(); model.train()
    say(model.code)
    """,
)
job(
    "is traced and exported",
    """
    import warnings; warnings.simplefilter("ignore")
    traced = torch.jit.trace(model, torch.ones(2, 4))
    say(traced.graph.nodes().__class__.__name__, digest(str(traced.code)))
    exported = torch.export.export(model, (torch.ones(2, 4),))
    say(exported.graph_module.code.strip())
    train()
    """,
    modules=(COMPILER,),
)
job(
    "uses function transforms",
    """
    from torch.func import functional_call, grad, jvp, vmap
    parameters = dict(model.named_parameters())
    def loss(parameters, x):
        return functional_call(model, parameters, (x,)).sum()
    for _ in range(9):
        gradients = grad(loss)(parameters, torch.ones(2, 4))
        each = vmap(grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 2, 4))
        train_step()
    say(digest(gradients["weight"].tolist()), digest(each["weight"].tolist()))
    state()
    """,
)
job(
    "checks its gradients",
    """
    from torch.autograd import gradcheck
    layer = torch.nn.Linear(3, 2).double()
    say(gradcheck(layer, (torch.ones(2, 3, dtype=torch.double, requires_grad=True),)))
    train()
    """,
)
job(
    "goes back in time to find anomalies",
    """
    with torch.autograd.detect_anomaly(check_nan=True):
        train(3)
        try:
            (torch.zeros(1, requires_grad=True).sqrt() * 0).sum().backward()
        except RuntimeError as error:
            say(str(error)[:60])
    train(3)
    """,
    shows_frames=True,
)
job(
    "keeps tensors by hooks of saved tensors",
    """
    seen = []
    def pack(tensor): seen.append("pack"); return tensor
    def unpack(tensor): seen.append("unpack"); return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        train()
    say(len(seen), digest(seen))
    """,
)
job(
    "computes activations again",
    """
    from torch.utils.checkpoint import checkpoint
    for reentrant in (True, False):
        for _ in range(5):
            optimizer.zero_grad()
            checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
            optimizer.step()
    state()
    """,
)
job(
    "scales its losses",
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index in range(9):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(2, 4)).sum()
        scaler.scale(loss * (float("inf") if index == 4 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        say(scaler.get_scale())
    state()
    """,
)
job(
    "runs doctests",
    '''
    def double(x):
        """Twice as much.

        >>> double(2)
        4
        >>> torch.ones(1, requires_grad=True).backward()
        >>> torch.ones(2, requires_grad=True).backward()
        Traceback (most recent call last):
        RuntimeError: grad can be implicitly created only for scalar outputs
        >>> double(3)
        7
        """
        return 2 * x
    import doctest
    say(doctest.testmod())
    train()
    ''',
)
job(
    "prints a traceback of its backward",
    """
    import traceback
    train()
    try:
        torch.ones(2, requires_grad=True).backward()
    except RuntimeError:
        traceback.print_exc()
    """,
    shows_frames=True,
)
job("ends by an error in its backward", "train(); torch.ones(2, requires_grad=True).backward()")
job(
    "ends by an error in a hook of its own within other errors",
    """
    train()
    def hook(gradient):
        raise ValueError("mine")
    model.weight.register_hook(hook)
    try:
        train_step()
    except ValueError as error:
        torch.save(lambda: 0, "saved.pt")
    """,
)
job(
    "ends by an error in a loader",
    """
    class Broken(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, index):
            if index == 6: raise KeyError("six")
            return torch.ones(4)
    for batch in torch.utils.data.DataLoader(Broken(), batch_size=2):
        train_step()
    """,
)

# Signals.

job(
    "waits for a signal",
    """
    train()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    open("ready", "w").close()
    say(signal.sigwait({signal.SIGTERM}).name)
    train(3)
    """,
    signals=(15,),
    is_quick=True,
)
job(
    "reads signals from a descriptor",
    """
    import ctypes, struct
    train()
    libc = ctypes.CDLL(None)
    mask = ctypes.create_string_buffer(128)
    libc.sigemptyset(mask); libc.sigaddset(mask, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    descriptor = libc.signalfd(-1, mask, 0)
    open("ready", "w").close()
    say(struct.unpack("I", os.read(descriptor, 128)[:4]))
    train(3)
    """,
    signals=(15,),
)
job(
    "keeps SIGTERM away while it saves",
    """
    train(5)
    seen = []
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    open("ready", "w").close()
    until = time.monotonic() + 60
    while signal.SIGTERM not in signal.sigpending() and time.monotonic() < until: time.sleep(0.01)
    torch.save(model.state_dict(), "saved.pt")
    say("saved")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    say("never")
    """,
    signals=(15,),
)
# Steps that end within 10 ms of a write are written within a second.
WRITTEN = "train(5); time.sleep(1.5); open('ready', 'w').close(); time.sleep(60)"
job("is asked to end", WRITTEN, signals=(15,))
job("loses its terminal", WRITTEN, signals=(1,))
job("is interrupted", "train(5); open('ready', 'w').close(); time.sleep(60)", signals=(2,))
job(
    "is interrupted while it saves what it can, and again",
    """
    train(5)
    try:
        open("ready", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        say("once")
        try:
            open("ready1", "w").close()
            time.sleep(60)
        except KeyboardInterrupt:
            say("twice")
            train(4)
            raise
    """,
    signals=(2, 2),
)
job(
    "saves when it is asked to end, and trains on",
    """
    def save(number, frame):
        torch.save(model.state_dict(), f"saved{number}.pt")
        say("saved")
    signal.signal(signal.SIGTERM, save)
    train(5)
    open("ready", "w").close()
    until = time.monotonic() + 60
    while not os.path.exists("saved15.pt") and time.monotonic() < until: time.sleep(0.01)
    train(5)
    """,
    signals=(15,),
)
job(
    "ends by an exception of its handler",
    """
    class Ended(BaseException): pass
    def end(number, frame): raise Ended(number)
    signal.signal(signal.SIGUSR1, end)
    train(5)
    try:
        open("ready", "w").close()
        while True: train_step()
    except Ended as ended:
        say("ended", ended)
    train(3)
    """.replace("train(3)", "say('done')"),
    signals=(10,),
)
job(
    "uses every signal that it may",
    """
    seen = []
    numbers = [n for n in signal.valid_signals() if n not in (9, 19, 14)]
    for number in numbers:
        signal.signal(number, lambda n, frame: seen.append(int(n)))
    train()
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.001)
    train(3)
    say(sorted(seen) == sorted(map(int, numbers)), sorted(set(map(int, numbers)) - set(seen)))
    """,
)
job("looks at the handlers of all signals",
    "say(handlers()); train(); say(handlers()); say(status('SigBlk', 'SigIgn', 'SigPnd'))",
    is_quick=True)  # fmt: skip
# But for that of libc (33), and for a handler of ours of the last real-time signal, which nothing else uses.
job(
    "looks at which signals C handles",
    "train(); say(hex(int(status('SigCgt')['SigCgt'], 16) & ~(1 << 32 | 1 << 63)))",
)
job(
    "wakes by an alarm",
    """
    seen = []
    signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    train(30)
    signal.setitimer(signal.ITIMER_REAL, 0)
    say(bool(seen))
    signal.alarm(1)
    signal.pause()
    say("woken")
    """,
)
job(
    "is profiled by a timer of the kernel",
    """
    seen = []
    signal.signal(signal.SIGPROF, lambda *_: seen.append(1))
    signal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)
    train(30)
    signal.setitimer(signal.ITIMER_PROF, 0)
    """,
)
job(
    "is woken through a descriptor",
    """
    import socket
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    signal.signal(signal.SIGUSR1, lambda *_: None)
    train()
    os.kill(os.getpid(), signal.SIGUSR1)
    say(ours.recv(16))
    ours.setblocking(False)
    train()
    try:
        say(ours.recv(16))
    except BlockingIOError:
        say("nothing")
    """,
)
job(
    "runs a loop of asyncio that handles signals",
    """
    import asyncio
    async def main():
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, lambda: (say("asked"), ended.set()))
        train(5)
        open("ready", "w").close()
        await ended.wait()
        await asyncio.to_thread(train, 4)
    asyncio.run(main())
    """,
    signals=(15,),
)
job(
    "hears of children that end",
    """
    import subprocess
    seen = []
    signal.signal(signal.SIGCHLD, lambda *_: seen.append("child"))
    train()
    say(seen)
    subprocess.run(["true"])
    time.sleep(0.05)
    train(4)
    say(len(seen))
    """,
)
job(
    "waits for any child",
    """
    train(5)
    try:
        say(os.waitpid(-1, os.WNOHANG))
    except ChildProcessError:
        say("no child")
    child = os.fork()
    if child == 0: os._exit(4)
    say(os.waitpid(-1, 0)[0] == child)
    train(4)
    try:
        say(os.wait())
    except ChildProcessError:
        say("no child")
    """,
    is_quick=True,
)
job(
    "has faulthandler write on a signal",
    """
    import faulthandler
    file = open("stacks.txt", "w")
    faulthandler.register(signum=signal.SIGUSR1, file=file, all_threads=False, chain=False)
    train(5)
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    os.kill(os.getpid(), signal.SIGUSR1)
    file.flush()
    train(3)
    say(faulthandler.unregister(signal.SIGUSR1))
    """,
)
job(
    "enables faulthandler and crashes",
    """
    import faulthandler
    faulthandler.enable(all_threads=False)
    train()
    os.kill(os.getpid(), signal.SIGSEGV)
    """,
    shows_frames=True,
)
job("asks whether faulthandler is enabled", "import faulthandler; train(); say(faulthandler.is_enabled())")
job("crashes without faulthandler", "train(); os.kill(os.getpid(), signal.SIGSEGV)")
job(
    "dumps stacks later",
    """
    import faulthandler
    file = open("stacks.txt", "w")
    faulthandler.dump_traceback_later(0.3, file=file)
    train(5)
    time.sleep(0.6)
    faulthandler.cancel_dump_traceback_later()
    file.close()
    say("0x" in open("stacks.txt").read())
    os.remove("stacks.txt")
    """,
)
job(
    "is asked to end with workers of a loader",
    """
    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 1000
        def __getitem__(self, index): return torch.ones(4)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=2)
    for index, batch in enumerate(loader):
        train_step()
        if index == 8:
            open("ready", "w").close()
            time.sleep(60)
    """,
    signals=(15,),
)
job(
    "has workers that look at themselves",
    """
    class Own(torch.utils.data.Dataset):
        def __len__(self): return 8
        def __getitem__(self, index):
            say(index, handlers() == before, len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
            return torch.ones(4)
    before = handlers()
    train(3)
    for batch in torch.utils.data.DataLoader(Own(), batch_size=2, num_workers=1):
        train_step()
    """,
)

# Threads, descriptors and processes.

job(
    "counts its threads",
    "train(); say(threading.active_count(), [t.name for t in threading.enumerate()])",
    is_quick=True,
)
job(
    "joins all threads but the main one",
    """
    train()
    for thread in threading.enumerate():
        if thread is not threading.main_thread(): thread.join(30)
    say("joined")
    """,
)
job(
    "trains in a thread",
    """
    thread = threading.Thread(target=train)
    thread.start(); thread.join()
    say(threading.active_count())
    """,
)
job(
    "trains in a thread that is left behind",
    """
    def go():
        train(5)
        open("trained", "w").close()
        while True:
            time.sleep(0.01)
    threading.Thread(target=go, daemon=True).start()
    while not os.path.exists("trained"): time.sleep(0.01)
    """,
    lines=1,
)
job(
    "traces new threads",
    """
    started = []
    threading.setprofile(lambda *_: None)
    threading.settrace(lambda *a: started.append(a[0].f_code.co_filename))
    train()
    threading.settrace(None); threading.setprofile(None)
    say(len(started))
    """,
)
job(
    "has hooks for threads and exits",
    """
    threading.excepthook = lambda args: say("thread", args.exc_type.__name__)
    sys.unraisablehook = lambda args: say("unraisable", args.exc_type.__name__)
    def fail(): raise ValueError
    thread = threading.Thread(target=fail); thread.start(); thread.join()
    train()
    class Bad:
        def __del__(self): raise KeyError
    bad = Bad(); del bad
    say(threading.active_count())
    """,
)
job(
    "replaces `Thread.start`",
    """
    original, started = threading.Thread.start, []
    def start(thread): started.append(thread.name); original(thread)
    threading.Thread.start = start
    train()
    say(started)
    """,
)
job(
    "opens files under the lowest numbers",
    """
    train()
    descriptors = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    say(descriptors, os.dup(0))
    """,
)
job(
    "closes all descriptors",
    """
    train(5)
    os.closerange(3, 256)
    mine = open("mine.txt", "w"); other = open("other.txt", "w")
    train(9)
    print("mine", file=mine); print("other", file=other)
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    train(3)
    """,
    lines=3,
)
job(
    "puts its own files in the place of all low descriptors",
    """
    train(5)
    mine = os.open("mine.txt", os.O_CREAT | os.O_RDWR)
    for number in range(3, 40):
        if number != mine: os.dup2(mine, number)
    train(9)
    os.write(mine, b"mine")
    os.lseek(mine, 0, 0)
    say(os.read(mine, 100))
    """,
    lines=2,
)
job(
    "sends its output elsewhere",
    """
    train(4)
    file = os.open("output.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1); os.dup2(file, 2)
    train(5)
    sys.stderr.write("error\\n")
    os.close(1); os.close(2)
    train_step()
    """,
)
job(
    "starts without standard streams",
    """
    with open("seen.txt", "w") as file:
        sys.stdout = file
        train()
    """,
    through=("sh", "-c", '"$@" <&- >&- 2>&-', "sh"),
)
job(
    "becomes a daemon",
    """
    train(5)
    open("waits", "w").close()
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 64)
    os.open("/dev/null", os.O_RDWR); os.dup(0); os.dup(0)
    train(9)
    lines = f"{threading.active_count()} {digest([p.tolist() for p in model.parameters()])}"
    with open("late.tmp", "w") as file: file.write(lines)
    os.rename("late.tmp", "late")
    """,
    lines=1,
)
job(
    "forks while it trains",
    """
    for index in range(4):
        train(3)
        child = os.fork()
        if child == 0:
            train(3)
            say(threading.active_count())
            os._exit(index)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
)
job(
    "forks in a thread",
    """
    def go():
        child = os.fork()
        if child == 0:
            train(2)
            os._exit(5)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    train(5)
    thread = threading.Thread(target=go); thread.start(); thread.join()
    train(3)
    """,
)
job(
    "forks and both go on to the end",
    """
    train(5)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    train(4)
    atexit.register(say, "exit")
    """,
)
for method in ("fork", "spawn", "forkserver"):
    job(
        f"has processes of multiprocessing that {method} and train",
        f"""
        import multiprocessing
        def work(queue):
            train(3)
            queue.put([p.tolist() for p in model.parameters()])
        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            queue = context.Queue()
            process = context.Process(target=work, args=(queue,))
            process.start()
            say(digest(queue.get()))
            process.join()
            say(process.exitcode, len(multiprocessing.active_children()))
            train(5)
        """,
    )
job(
    "has a pool of processes",
    """
    import concurrent.futures
    def square(x): return x * x
    train(4)
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        say(list(pool.map(square, range(4))))
    train(4)
    """,
)
job(
    "ends with its parent",
    """
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    train()
    """,
)
job(
    "replaces itself by another program",
    """
    train()
    sys.stdout.flush()
    os.execv("/bin/sh", ["sh", "-c", "echo replaced; ls /proc/self/fd | wc -l; exit 5"])
    """,
)
job(
    "replaces itself by itself",
    """
    train()
    if len(sys.argv) < 3:
        os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
    """,
)
job(
    "fails to replace itself",
    """
    train(4)
    try:
        os.execv("/no/such/program", ["x"])
    except FileNotFoundError as error:
        say(error)
    train(4)
    """,
)
job(
    "starts other programs",
    """
    import subprocess
    train(4)
    say(subprocess.check_output(["sh", "-c", "ls /proc/self/fd | wc -l; ulimit -n"], text=True))
    say(subprocess.run(["false"]).returncode, os.system("exit 3"), os.popen("echo out").read())
    train(4)
    """,
)
job(
    "looks at the signals that its children inherit",
    """
    import subprocess
    train(4)
    say(subprocess.check_output(["grep", "Sig[BIC]", "/proc/self/status"], text=True))
    """,
)

# The end.

job(
    "has handlers of its exit that train on",
    """
    def last():
        say("last")
        train(4)
    atexit.register(last)
    train(4)
    """,
)
job(
    "registers a handler of its exit before it imports torch",
    """
    import atexit, sys
    def last():
        import torch
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad(); layer(torch.ones(1, 2)).sum().backward(); optimizer.step()
        print("trained at the exit", flush=True)
    atexit.register(last)
    import torch
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad(); layer(torch.ones(1, 2)).sum().backward(); optimizer.step()
    """,
    bare=True,
)
job("runs the handlers of its exit itself", "train(5); atexit._run_exitfuncs(); train(5)", lines=1)
job("forgets the handlers of its exit", "train(5); atexit._clear(); train(5)")
job(
    "counts the handlers of its exit",
    "atexit.register(say, 'first'); train(5); atexit.unregister(say); say('no first')",
)
job(
    "exits in a thread while others run",
    """
    def go():
        while True: time.sleep(0.01)
    threading.Thread(target=go, daemon=True).start()
    train()
    sys.exit(4)
    """,
)
job(
    "exits within a backward",
    """
    model.weight.register_hook(lambda gradient: sys.exit(6) if len(steps) > 4 else steps.append(1))
    steps = []
    train()
    """,
    shows_frames=True,
)
job(
    "has a hook for uncaught exceptions",
    """
    sys.excepthook = lambda kind, error, place: say("hook", kind.__name__, error)
    train(5)
    raise ValueError("mine")
    """,
)
job("deletes its hook for uncaught exceptions", "train(5); del sys.excepthook; raise ValueError('mine')")
job(
    "writes its log by logging",
    """
    import logging, logging.config
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True,
        "formatters": {"short": {"format": "%(levelname)s %(name)s %(threadName)s %(message)s"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout",
                             "formatter": "short"}},
        "root": {"level": "DEBUG", "handlers": ["out"]}})
    logging.captureWarnings(True)
    train()
    logging.getLogger("mine").info("trained")
    say(len(logging.root.handlers), logging.root.level, logging.lastResort.level)
    """,
)

# Tools that run beside the recorder.

job("is measured by coverage", "train()\nif False:\n    say('never')\n", needs=("coverage",),
    start=(sys.executable, "-m", "coverage", "run", "--source", ".", "--data-file", "covered", "job.py"),
    then="coverage report --data-file covered > report.txt; rm covered")  # fmt: skip
job("is debugged", "train()", needs=("debugpy",), variables=(("PYDEVD_DISABLE_FILE_VALIDATION", "1"),),
    start=(sys.executable, "-m", "debugpy", "--listen", "127.0.0.1:0", "job.py"))  # fmt: skip
job("is profiled by pyinstrument", "train()", needs=("pyinstrument",),
    start=(sys.executable, "-m", "pyinstrument", "-o", "profile.html", "-r", "html", "job.py"))  # fmt: skip
job("is profiled line by line", """
    @profile
    def mine():
        train()
        return 3
    mine()
    """, needs=("line_profiler",),
    start=(sys.executable, "-m", "kernprof", "-q", "-l", "-o", "profile.lprof", "job.py"),
    then="python -m line_profiler profile.lprof | grep -c Line > lines.txt; rm profile.lprof")  # fmt: skip
job("is traced by VizTracer", "train()", needs=("viztracer",),
    start=(sys.executable, "-m", "viztracer", "--quiet", "--tracer_entries", "1000", "-o", "profile.json",
           "job.py"))  # fmt: skip
job("is run by pdb", "train()", start=(sys.executable, "-m", "pdb", "-c", "continue", "-c", "quit", "job.py"))
job(
    "is run by runpy within another program",
    """
    import runpy, sys
    open("inner.py", "w").write("import torch\\nprint(__name__, torch.ones(1).item())\\n")
    runpy.run_path("inner.py", run_name="__main__")
    train()
    """,
)
job(
    "has functions of gevent in the place of those of the library",
    """
    from gevent import monkey; monkey.patch_all()
    import sys; sys.argv = ["job"]
    import gevent, torch
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    seen = []
    def other():
        for _ in range(3): seen.append("other"); gevent.sleep(0.01)
    def train():
        for _ in range(6):
            optimizer.zero_grad(); layer(torch.ones(1, 2)).sum().backward(); optimizer.step()
            gevent.sleep(0.002)
    gevent.joinall([gevent.spawn(other), gevent.spawn(train)])
    import threading
    print(len(seen), threading.active_count(), flush=True)
    """,
    bare=True,
    needs=("gevent",),
    lines=5,
    steps=0,
)
job(
    "takes functions of gevent once it trains",
    """
    import warnings; warnings.simplefilter("ignore")
    train(5)
    from gevent import monkey; monkey.patch_all()
    import gevent
    gevent.joinall([gevent.spawn(train, 4)])
    """,
    needs=("gevent",),
    lines=5,
)
job(
    "has functions of eventlet in the place of those of the library",
    """
    import warnings; warnings.simplefilter("ignore")
    import eventlet; eventlet.monkey_patch()
    import torch
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    def train():
        for _ in range(6):
            optimizer.zero_grad(); layer(torch.ones(1, 2)).sum().backward(); optimizer.step()
            eventlet.sleep(0.002)
        return "trained"
    print(eventlet.spawn(train).wait(), flush=True)
    """,
    bare=True,
    needs=("eventlet",),
    lines=5,
    steps=0,
)
job(
    "is tested by unittest",
    """
    import unittest
    class Test(unittest.TestCase):
        def test_training(self):
            train()
            with self.assertRaises(RuntimeError): torch.ones(2, requires_grad=True).backward()
            with self.assertNoLogs(): train(3)
    unittest.main(argv=["job"], exit=False)
    """.replace(
        "exit=False)", "exit=False, testRunner=unittest.TextTestRunner(stream=open(os.devnull, 'w')))"
    ),
)
job(
    "is tested with mocks of torch",
    """
    from unittest import mock
    evaluating = mock.patch.object(torch.nn.Module, "eval", autospec=True)
    with mock.patch("torch.save") as save, evaluating as evaluate:
        train()
        torch.save(model, "saved.pt"); model.eval()
        say(save.call_count, evaluate.call_count)
    with mock.patch("time.time_ns", side_effect=[1, 2]), mock.patch("os.getpid", return_value=7):
        train(4)
    with mock.patch("builtins.open", mock.mock_open(read_data="x")), mock.patch("threading.Thread") as thread:
        train(4)
        say(thread.call_count)
    """,
)
job(
    "is watched by torch's own profiler",
    """
    from torch.profiler import profile, ProfilerActivity, schedule
    ended = []
    def ready(profiler): ended.append(sorted({e.key for e in profiler.key_averages()}))
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
                 on_trace_ready=ready) as profiler:
        for _ in range(9):
            train_step()
            profiler.step()
    say(ended)
    state()
    """,
    variables=(("KINETO_LOG_LEVEL", "99"),),
)
job(
    "profiles one step of its own",
    """
    train(4)
    with torch.autograd.profiler.profile() as profiler:
        train_step()
    say(sorted({e.key for e in profiler.key_averages()}), sum(e.count for e in profiler.key_averages()))
    train(4)
    """,
    variables=(("KINETO_LOG_LEVEL", "99"),),
)

# Launchers and ranks.

RANKS = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    """


def ranks(kind, body, number=2, **how):
    """Add a job with several ranks, whose lines begin with the rank and come in the order of ranks."""
    job(kind, RANKS + body, ranks=number, **how)


REDUCES = """
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
        for parameter in model.parameters(): dist.all_reduce(parameter.grad)
        optimizer.step()
    open(f"weights{rank}.txt", "w").write(digest([p.tolist() for p in model.parameters()]))
    dist.destroy_process_group()
"""
ranks("trains on two ranks", REDUCES)
ranks(
    "trains on two ranks with DDP",
    """
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(9):
        optimizer.zero_grad()
        ddp(torch.full((2, 4), float(rank + 1))).sum().backward()
        optimizer.step()
    import copy, pickle, io
    content = io.BytesIO()
    torch.save(ddp, content); torch.save(ddp.state_dict(), content)
    weights = digest([p.tolist() for p in ddp.parameters()])
    open(f"weights{rank}.txt", "w").write(f"{weights} {sorted(vars(ddp))}")
    dist.destroy_process_group()
    """,
    modules=(COMPILER,),
)
ranks("trains on eight ranks", REDUCES, 8)
ranks(
    "sends tensors from rank to rank",
    """
    for index in range(9):
        tensor = torch.full((4,), float(index))
        if rank: dist.recv(tensor, 0)
        else: dist.send(tensor, 1)
        train_step()
    work = dist.isend(torch.ones(2), 1) if rank == 0 else dist.irecv(torch.ones(2), 0)
    work.wait()
    open(f"weights{rank}.txt", "w").write(f"{tensor.tolist()} {type(work).__name__}")
    dist.destroy_process_group()
    """,
)
ranks(
    "leaves its group as it is",
    """
    for _ in range(5): train_step()
    """,
)
ranks(
    "uses the store of its group",
    """
    store = dist.distributed_c10d._get_default_store()
    for _ in range(5): train_step()
    time.sleep(2.5)
    dist.barrier()
    if rank == 0: say(sorted(key for key in ("dpro/windows", "dpro/clocks/hosts") if store.check([key])))
    store.add("mine", 1)
    dist.barrier()
    if rank == 0: say(store.get("mine"))
    dist.destroy_process_group()
    """,
)
ranks(
    "loses one of its ranks",
    """
    for _ in range(5): train_step()
    dist.barrier()
    if rank: os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()
    except RuntimeError:
        time.sleep(60)  # until it is ended
    """,
)
ranks(
    "makes groups while it trains",
    """
    for index in range(6):
        group = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(2), group=group)
        train_step()
        dist.destroy_process_group(group)
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    open(f"mesh{rank}.txt", "w").write(f"{mesh} {dist.get_world_size()}")
    dist.destroy_process_group()
    """,
)
ranks(
    "shards its model",
    """
    from torch.distributed.fsdp import fully_shard
    mesh = dist.init_device_mesh("cpu", (2,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model: fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
        optimizer.step()
    open(f"weights{rank}.txt", "w").write(digest([p.to_local().tolist() for p in model.parameters()]))
    dist.destroy_process_group()
    """,
    modules=(COMPILER,),
)
job("is started again by torchrun when a rank fails", """
    import torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    store = f"file://{os.getcwd()}/store{attempt}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for _ in range(5): train_step()
    open(f"attempt{attempt}rank{rank}.txt", "w").write(digest([p.tolist() for p in model.parameters()]))
    dist.barrier()
    if attempt == 0 and rank == 1: sys.exit(3)
    if attempt == 0: time.sleep(60)
    dist.destroy_process_group()
    """, noisy=True,
    start=(*TORCHRUN, "--standalone", "--max-restarts", "1", "--monitor-interval", "0.1", "job.py"),
    then="rm -f store*")  # fmt: skip
job(
    "is started by torchrun, and fails",
    """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(5): train_step()
    dist.barrier()
    if dist.get_rank() == 1: sys.exit(5)
    time.sleep(60)
    """,
    start=(*TORCHRUN, "--standalone", "job.py"),
    noisy=True,
)
job(
    "starts ranks by torch.multiprocessing",
    """
    import torch.multiprocessing
    def work(rank):
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
        dist.barrier()
        for _ in range(5): train_step()
        open(f"weights{rank}.txt", "w").write(digest([p.tolist() for p in model.parameters()]))
        dist.barrier()
        dist.destroy_process_group()
    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, nprocs=2)
    """,
)
job(
    "starts ranks of which one raises",
    """
    import torch.multiprocessing
    def work(rank):
        while rank and not os.path.exists("trained"): time.sleep(0.01)  # one prints after the other
        train(3)
        if rank: raise ValueError("mine")
        open("trained", "w").close()
        time.sleep(30)
    if __name__ == "__main__":
        try:
            torch.multiprocessing.spawn(work, nprocs=2)
        except torch.multiprocessing.ProcessRaisedException as error:
            say(str(error).splitlines()[-2:])
    """,
    steps=0,
)
job("is run under time limits", "train()", through=("timeout", "100"))
job("is run with a lower priority", "train(); say(os.nice(0))", through=("nice", "-n", "5"))
job("is run in a shell's pipe", "train()", through=("sh", "-c", 'echo given | "$@" 2>&1 | cat; echo', "sh"))
job(
    "is run in the background of a shell",
    "train(); say(os.getpgrp() == os.getpid())",
    through=("sh", "-c", '"$@" & wait $!; echo $?', "sh"),
)
job(
    "evaluates only",
    """
    model.eval()
    with torch.inference_mode():
        until = time.monotonic() + 7
        while time.monotonic() < until:
            result = model(torch.ones(2, 4))
            time.sleep(0.01)
    say(digest(result.tolist()), sorted(vars(model)))
    import pickle
    say(sorted(vars(pickle.loads(pickle.dumps(model)))))
    """,
    steps=0,
)
job("imports torch and does nothing", "say(torch.__version__)", steps=0)
job(
    "imports torch in a thread",
    """
    import threading
    def go():
        import torch
        layer = torch.nn.Linear(2, 2); optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        for _ in range(6):
            optimizer.zero_grad(); layer(torch.ones(1, 2)).sum().backward(); optimizer.step()
        print("trained", flush=True)
    thread = threading.Thread(target=go); thread.start(); thread.join()
    """,
    bare=True,
)
job("never imports torch", "print('no torch')", bare=True, steps=0)
job("is not Python", "", bare=True, start=("sh", "-c", "echo $0 $#; exit 9"), steps=0)
job(
    "changes its user's mask and limits",
    """
    import resource
    say(oct(os.umask(0o077)), *map(resource.getrlimit, (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)))
    train()
    torch.save(model.state_dict(), "saved.pt")
    say(oct(os.stat("saved.pt").st_mode), oct(os.umask(0o022)))
    """,
)
job(
    "looks at its environment and path",
    """
    train()
    say(sorted(name for name in os.environ if "dpro" in name.lower()), sys.flags, sys.argv)
    say(os.getcwd() == sys.path[0], __file__ == os.path.join(os.getcwd(), "job.py"))
    say(len(sys.path_hooks), sys.dont_write_bytecode, sys.getswitchinterval())
    """,
)
job(
    "draws random numbers",
    """
    for _ in range(6):
        train_step()
        say(random.random(), torch.rand(1).item(), digest(torch.randperm(8).tolist()))
    try:
        import numpy
        say(numpy.random.rand())
    except ImportError:
        pass
    """.replace("say(numpy.random.rand())", "say(len(numpy.random.rand(2)))"),
)
job(
    "loads batches in workers by random numbers",
    """
    class Noise(torch.utils.data.Dataset):
        def __len__(self): return 16
        def __getitem__(self, index): return torch.rand(4)
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(Noise(), batch_size=4, num_workers=2, shuffle=True):
            train_step(); say(digest(batch.tolist()))
    state()
    """,
)
job(
    "is deterministic by demand",
    "torch.use_deterministic_algorithms(True); train(); say(torch.get_num_threads())",
)
job(
    "saves and loads, and looks at what it saved",
    """
    import io, zipfile
    for _ in range(3):
        train_step()
        torch.save({"model": model.state_dict(), "step": 3}, "saved.pt")
        content = io.BytesIO(); torch.save(model.state_dict(), content)
        say(digest(content.getvalue()), sorted(zipfile.ZipFile("saved.pt").namelist()))
        say(torch.load("saved.pt")["step"])
    for wrong in (lambda: torch.load("none.pt"), lambda: torch.save(1, "no/such/folder/x"),
                  lambda: torch.load(io.BytesIO(b"x"))):
        try:
            wrong()
        except Exception as error:
            say(type(error).__name__)
    state()
    """,
)
job(
    "saves to an object of its own",
    """
    class File:
        name = property(lambda self: say("name"))
        def __init__(self): self.content = []
        def write(self, content): self.content.append(bytes(content)); return len(content)
        def flush(self): pass
    train(4)
    for _ in range(3):
        file = File(); torch.save(model.state_dict(), file); say(digest(b"".join(file.content)))
    state()
    """,
)
job(
    "has a default device and a default type",
    """
    torch.set_default_device("cpu"); torch.set_default_dtype(torch.float64)
    model = torch.nn.Linear(4, 4); optimizer = Descent(model.parameters())
    train()
    say(torch.ones(1).dtype)
    """,
)
job(
    "uses several optimizers by turns",
    """
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    a, b = torch.optim.SGD(first.parameters(), 0.1), torch.optim.Adam(second.parameters(), 0.1)
    for index in range(12):
        for layer, optimizer in ((first, a), (second, b)):
            optimizer.zero_grad(); layer(torch.ones(2, 4)).sum().backward(); optimizer.step()
    state()
    """,
)
job(
    "updates within its backward",
    """
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, own=own: own.step())
    for _ in range(9): model(torch.ones(2, 4)).sum().backward()
    state()
    """,
)
job(
    "registers hooks of optimizers and modules",
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
    from torch.nn.modules.module import register_module_forward_hook
    seen = []
    register_optimizer_step_pre_hook(lambda *a: seen.append("pre"))
    register_optimizer_step_post_hook(lambda *a: seen.append("post"))
    register_module_forward_hook(lambda *a: seen.append("forward"))
    train()
    say(digest(seen), len(seen), len(model._forward_hooks), len(optimizer._optimizer_step_post_hooks))
    """,
)
job(
    "counts the operators that each step has",
    """
    from collections import Counter
    from torch.utils._python_dispatch import TorchDispatchMode
    class Count(TorchDispatchMode):
        def __init__(self): super().__init__(); self.counts = Counter()
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.counts[str(function)] += 1
            return function(*args, **(kwargs or {}))
    for _ in range(8):
        with Count() as count: train_step()
        say(sorted(count.counts.items()))
    """,
)
job("logs what torch does", "train()", variables=(("TORCH_LOGS", "+all"),), noisy=True, lines=3)
job(
    "asks C++ to be talkative",
    "train()",
    variables=(("TORCH_CPP_LOG_LEVEL", "INFO"), ("TORCH_SHOW_CPP_STACKTRACES", "1")),
)
job("is run with assertions off and hashes fixed", "train(); say(hash('x'), __debug__)",
    start=(sys.executable, "-O", "job.py"), variables=(("PYTHONHASHSEED", "7"),))  # fmt: skip
job("is run in development mode", "train()", start=(sys.executable, "-X", "dev", "job.py"), shows_frames=True)
job(
    "is run with errors for warnings from the start",
    "train()",
    start=(sys.executable, "-W", "error", "job.py"),
    steps=0,
    shows_frames=True,
)
job("is run with its input open", "train(); say(sys.stdin.read())", start=(sys.executable, "-u", "job.py"))
job("says how long imports take", "train()", start=(sys.executable, "-X", "importtime", "job.py"),
    through=("sh", "-c", '"$@" 2>/dev/null', "sh"))  # fmt: skip
job(
    "has subclasses of what is replaced",
    """
    class Loader(torch.utils.data.DataLoader):
        def __iter__(self):
            for batch in super().__iter__(): yield batch * 2
    class Scaler(torch.amp.GradScaler):
        def step(self, optimizer, *a, **k): say("step"); return super().step(optimizer, *a, **k)
    scaler = Scaler("cpu", enabled=True, init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in Loader(torch.ones(12, 4), batch_size=2):
        optimizer.zero_grad(); scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer); scaler.update()
    state()
    """,
)
