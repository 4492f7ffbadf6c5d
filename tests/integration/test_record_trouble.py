"""Trouble in the recorder, in real jobs that train: a line in its log, and nothing to the job."""

import pytest

from dpro.schema import STEPS
from tests.jobs import COMPILER, ROOT, record, script, start

pytest.importorskip("torch")

# Each method of the recorder in turn raises, in a process that trains.

METHODS = [
    "recorder:Recorder.on_process_group", "recorder:Recorder.on_update", "recorder:Recorder.on_end",
    "recorder:Recorder.on_exit", "recorder:Recorder.on_fork", "recorder:Recorder._write_facts",
    "recorder:Recorder._every_second", "recorder:Recorder._sample", "recorder:Recorder._open",
    "windows:Windows._start", "windows:Windows.close",
    "windows:Windows.on_profiler", "windows:Windows.on_fork", "calls.flight:Flight.save",
    "windows:OpenWindow.end_step", "windows:Ranges.finish",
    "windows:UserProfilers.are_active", "windows:Windows.on_step",
    "windows:Windows.on_second", "kineto:Recording.stop", "plan:WindowPlan.take", "budget:Budget.step",
    "recorder:JobStore.leave", "process.requests:Requests.on_second", "process.requests:Requests.on_open",
    "process.stacks:Stacks.on_open", "process.stacks:Stacks.on_second", "process.stacks:Stacks.on_fork",
    "calls.flight:Flight.on_open", "calls.flight:Flight._look", "calls.flight:Flight.before_fork",
    "calls.flight:Flight.after_fork", "calls.buckets:Buckets.save", "calls.buckets:Buckets.on_module",
    "peers:sample", "peers:Peers.on_second", "peers:install",
    "process.exits:Exits.on_open", "process.exits:Exits.on_raise", "process.exits:Exits.on_fork",
    "process.exits:Exits.on_reaped", "process.exits:install", "recorder:Recorder.on_work",
    "recorder:Recorder._weigh", "recorder:Recorder._on_anchor", "recorder:Recorder.on_backward",
    "steps.host:HostFacts._add_collections", "steps.host:HostFacts.on_step", "steps.host:HostFacts._follow",
    "steps.host:install", "steps.data:DataWaits.on_wait", "steps.data:DataWaits.on_batch",
    "steps.data:install",
    "calls.mesh:Meshes.on_mesh", "calls.mesh:install", "steps.naming:NamedFunction.look",
    "steps.naming:NamedFunction.on_end", "steps.naming:install", "steps.inference:ModelCalls.on_eval",
    "steps.inference:install",
]  # fmt: skip

CORE = {
    method
    for method in METHODS
    if method.startswith(("recorder:", "windows:", "plan:", "budget:", "store:", "kineto:"))
}

SABOTAGE = """
import functools, gc, importlib, json, os, pathlib, subprocess, sys, time
import torch.distributed as dist

def tick():
    pass

sys.path.insert(0, PACKAGES)
hooks = importlib.import_module("inside.hooks")

def sabotaged(name, launch):
    def broken(*_, **__):
        raise ValueError("sabotage")
    module, _, path = name.partition(":")
    *path, method = path.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module("inside." + module))
    assert callable(getattr(owner, method))
    broken.__name__, broken.__module__ = method, "inside." + module
    setattr(owner, method, broken)
    hooks.install(str(launch))
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    dist.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    ddp = torch.nn.parallel.DistributedDataParallel(model.eval())
    for batch in torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=2):
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()
        tick()
    gc.collect(0)
    with torch.autograd.profiler.profile(use_kineto=True):
        pass
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    subprocess.run(["true"])
    dist.destroy_process_group()
    raise RuntimeError("the user's own")

gc.freeze()  # children that leave it alone are quick
children = {}
for name in METHODS:
    launch = pathlib.Path(name)
    launch.mkdir()
    config = dict.fromkeys(["shapes", "stacks", "modules", "memory", "execution_trace"], False)
    config |= {"every": 10, "budget": 0.01, "window_steps": 2, "skip": 3, "step": "job:tick"}
    (launch / "config.json").write_text(json.dumps(config))
    child = os.fork()
    if child == 0:
        os.dup2(os.open(launch / "stderr.txt", os.O_CREAT | os.O_WRONLY), 2)
        sabotaged(name, launch)
    children[child] = name
    while len(children) == 4 or (children and name == METHODS[-1]):  # some at a time: they mostly wait
        ended, status = os.wait()
        print(children.pop(ended), os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def sabotage(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sabotage")
    asked = [
        item.callspec.params.get("method") for item in request.session.items if hasattr(item, "callspec")
    ]
    methods = [method for method in METHODS if method in asked]
    body = f"PACKAGES, METHODS = {str(ROOT / 'collectors')!r}, {methods!r}\n{SABOTAGE}"
    job = start(script(folder, body, COMPILER), folder)
    try:
        stdout, _ = job.communicate(timeout=300)
    finally:
        job.kill()
    return folder, dict(line.split() for line in stdout.decode().splitlines())


@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=[] if method in CORE else pytest.mark.slow) for method in METHODS]
)
def test_trouble_in_the_recorder_is_one_line_in_its_log_and_nothing_to_the_job(sabotage, method):
    folder, codes = sabotage
    stderr = (folder / method / "stderr.txt").read_text()
    assert codes[method] == "1"
    assert "RuntimeError: the user's own" in stderr
    assert "ValueError" not in stderr
    lines = (folder / method / "log.txt").read_text().splitlines()
    assert len(lines) == 1
    assert "ValueError: sabotage" in lines[0]


def test_line_in_the_log_becomes_a_warning_of_the_run(tmp_path):
    body = """
    import os, pathlib
    train_step()
    [facts] = pathlib.Path("run/.raw").glob("*/*/facts.json")
    facts.with_name(f"checked.{os.getpid()}.tmp").mkdir()  # where the recorder is about to write
    for _ in range(12): train_step()
    print("trained")
    """
    run, done = record(tmp_path, script(tmp_path, body))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"trained\n", b"")
    logged = [warning for warning in run.manifest.warnings if warning.startswith("process ")]
    assert len(logged) == 1
    assert "continues without flight: IsADirectoryError" in logged[0]
    assert run.table(STEPS)["step"].to_list() == list(range(1, 13))
