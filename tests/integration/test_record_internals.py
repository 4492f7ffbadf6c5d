"""A real job runs on, and its steps are recorded, whichever private attribute PyTorch lacks."""

import pytest

pytest.importorskip("torch")

from dpro.collectors.inside import records
from dpro.collectors.inside.torch_internals import INTERNALS, internal
from tests.jobs import COMPILER, ROOT, complete, script

LACKING = ["", *(each.path for each in INTERNALS if internal(each.path) is not None)]
STEPS_RUN = 12

JOB = """
import atexit, faulthandler, importlib, json, os, pathlib
import torch.distributed as dist

sys.path.insert(0, PACKAGES)
hooks = importlib.import_module("inside.hooks")
internals = importlib.import_module("inside.torch_internals")

def trained(lacking, launch):
    find = internals.internal
    internals.internal = lambda path: None if path == lacking else find(path)
    hooks.install(str(launch))
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for batch in torch.utils.data.DataLoader(torch.ones(2 * STEPS, 4), batch_size=2):
        optimizer.zero_grad()
        ddp(batch).sum().backward()
        optimizer.step()
    with torch.autograd.profiler.profile(use_kineto=True):
        ddp(batch)
    dist.destroy_process_group()

gc.freeze()  # children that leave it alone are quick
children = {}
for number, name in enumerate(LACKING):
    launch = pathlib.Path(str(number)).resolve()
    launch.mkdir()
    config = dict.fromkeys(["shapes", "stacks", "memory"], False) | {"modules": True, "execution_trace": True}
    config |= {"every": 5, "budget": 0.01, "window_steps": 2, "skip": 3, "step": ""}
    (launch / "config.json").write_text(json.dumps(config))
    child = os.fork()
    if child == 0:
        faulthandler.enable()
        os.dup2(os.open(launch / "stderr.txt", os.O_CREAT | os.O_WRONLY), 2)
        trained(name, launch)
        atexit._run_exitfuncs()
        os._exit(0)  # Kineto's destructors wait for a thread that a forked child does not have
    children[child] = name
    while len(children) == 3 or (children and name == LACKING[-1]):
        ended, status = os.wait()
        print(children.pop(ended) or "-", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lacking")
    names = f"PACKAGES, LACKING, STEPS = {str(ROOT / 'collectors')!r}, {LACKING!r}, {STEPS_RUN}"
    done = complete(script(folder, f"{names}\n{JOB}", COMPILER), folder)
    return folder, dict(line.split() for line in done.stdout.decode().splitlines())


@pytest.mark.parametrize("lacking", LACKING)
def test_job_runs_on_and_its_steps_and_windows_are_recorded(jobs, lacking):
    folder, codes = jobs
    launch = folder / str(LACKING.index(lacking))
    assert codes[lacking or "-"] == "0", (launch / "stderr.txt").read_text()
    assert (launch / "log.txt").read_text() == ""
    [path] = launch.glob("*/records.bin")
    recorded = records.read_records(path)
    assert sum(each.kind == records.UPDATE for each in recorded) == STEPS_RUN
    assert {each.a for each in recorded if each.kind == records.WINDOW} == {0, 1}
