"""Changes to DDP, on a group of one."""

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dpro.replay.whatif.registry import parse_edit  # noqa: E402

pytestmark = pytest.mark.usefixtures("group")


def layers(count=4, width=64):
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(count)])


def gradients(job, module):
    module.zero_grad()
    torch.manual_seed(1)
    job.backward(module(torch.randn(3, 64)).pow(2).sum())
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def test_buckets_have_the_size_that_was_asked_for_whatever_the_script_says(job):
    job.change("bucket:mb=0.015")
    module = DistributedDataParallel(layers(), bucket_cap_mb=25)
    for _ in range(3):  # buckets are rebuilt after the first
        gradients(job, module)
    assert len(module._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) == 4
    [place] = job.places()
    assert place["instead_of"] == "bucket_cap_mb=25"
    assert place["where"].startswith("DistributedDataParallel at test_ddp.py:")


def test_a_list_of_bucket_sizes_gives_way_to_one_size(job):
    job.change("bucket:mb=2")
    module = DistributedDataParallel(layers(), bucket_cap_mb_list=[1, 3])
    assert module.bucket_bytes_cap_list == []
    assert job.places()[0]["instead_of"] == "bucket_cap_mb_list=[1, 3]"


def test_a_class_that_derives_from_ddp_is_changed_too(job):
    class Mine(DistributedDataParallel):
        def __init__(self, module):
            super().__init__(module)

    job.change("ddp:static_graph=true,gradient_as_bucket_view=true")
    module = Mine(layers())
    assert (module.static_graph, module.gradient_as_bucket_view) == (True, True)
    assert len(job.places()) == 1


def test_a_setting_that_the_script_has_itself_is_no_change(job):
    job.change("ddp:static_graph=true")
    DistributedDataParallel(layers(), static_graph=True)
    assert "the script sets static_graph=True itself" in job.refused()


def test_a_job_without_ddp_is_not_changed_and_says_so(job):
    job.change("bucket:mb=1")
    assert "wraps no module" in job.refused()


def test_arguments_that_ddp_does_not_know_are_its_own_complaint(job):
    job.change("bucket:mb=1")
    with pytest.raises(TypeError, match="no_such"):
        DistributedDataParallel(layers(), no_such=1)


@pytest.mark.parametrize(("word", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_gradients_are_reduced_in_half_precision(job, word, dtype):
    model = layers()
    exact = gradients(job, DistributedDataParallel(model))
    job.change(f"compress:to={word}")
    module = DistributedDataParallel(model)
    assert torch.equal(gradients(job, module), exact.to(dtype).float())
    assert job.places() == [{"where": "DDP of Sequential", "instead_of": "", "times": 1}]


@pytest.mark.parametrize("word", ["fp16", "bf16"])
def test_what_whatif_says_to_do_works_on_gloo(word):
    model = DistributedDataParallel(layers())
    how = parse_edit(f"compress:to={word}").how().removeprefix("with DDP: ")
    eval(how, {"model": model, "default_hooks": default_hooks})
    model(torch.randn(3, 64)).sum().backward()


def test_a_hook_of_the_script_wins(job):
    job.change("compress:to=fp16")
    module = DistributedDataParallel(layers())
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    gradients(job, module)
    assert "the script has registered a communication hook itself" in job.refused()
    assert [hook for hook, _ in module._comm_hooks] == [default_hooks.allreduce_hook]


def test_a_hook_in_c_of_the_script_wins_too(job):
    job.change("compress:to=fp16")
    module = DistributedDataParallel(layers())
    module._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.ALLREDUCE)
    gradients(job, module)
    assert "itself" in job.refused()


def test_power_sgd_is_refused_where_gloo_would_crash(job):
    job.change("compress:powersgd_rank=2")
    module = DistributedDataParallel(layers(), bucket_cap_mb=0.015)
    gradients(job, module)
    assert "crashes on gloo with 4 buckets" in job.refused()


def test_power_sgd_compresses_to_the_rank_that_was_asked_for(job):
    job.change("compress:powersgd_rank=2")
    module = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
    for _ in range(6):
        found = gradients(job, module).reshape(64, 64)
    assert torch.linalg.matrix_rank(found) <= 2
    assert len(job.places()) == 1


def test_local_updates_average_parameters_every_few_updates(job, monkeypatch):
    from torch.distributed.algorithms.model_averaging import utils

    averaged, updates = [], []
    monkeypatch.setattr(
        utils, "average_parameters_or_parameter_groups", lambda *_: averaged.append(len(updates))
    )
    job.change("local-updates:every=4")
    module = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(14):
        updates.append(number)
        gradients(job, module)
        optimizer.step()
    assert averaged == [4, 8, 12]
    assert len(job.places()) == 1


def test_local_updates_are_refused_where_two_optimizers_share_a_module(job):
    job.change("local-updates:every=4")
    module = DistributedDataParallel(layers())
    first, second, *_ = module.parameters()
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in (first, second)]
    gradients(job, module)
    for optimizer in optimizers:
        optimizer.step()
    [said] = job.said()
    assert "several optimizers" in said["refused"][0]
