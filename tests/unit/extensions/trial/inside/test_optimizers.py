"""Fused and foreach optimizers."""

import pytest

torch = pytest.importorskip("torch")


def trained(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).pow(2).sum().backward()
        optimizer.step()
    return optimizer, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_a_fused_optimizer_does_the_same(job, name):
    cls = getattr(torch.optim, name)
    _, expected = trained(lambda parameters: cls(parameters, lr=0.01))
    job.change("optimizer:impl=fused")
    optimizer, found = trained(lambda parameters: cls(parameters, lr=0.01))
    assert all(group["fused"] for group in optimizer.param_groups)
    torch.testing.assert_close(found, expected)
    [place] = job.places()
    assert place["where"].startswith(f"{name} at test_optimizers.py:")
    assert place["times"] == 1


def test_parameters_may_come_from_a_generator(job):
    job.change("optimizer:impl=loop")
    optimizer, _ = trained(lambda parameters: torch.optim.SGD((each for each in parameters), lr=0.1))
    assert [group["foreach"] for group in optimizer.param_groups] == [False]


def test_a_version_that_excludes_the_one_asked_for_gives_way_and_is_named(job):
    job.change("optimizer:impl=fused")
    optimizer, _ = trained(lambda parameters: torch.optim.AdamW(parameters, foreach=True))
    assert optimizer.defaults["fused"]
    assert job.places()[0]["instead_of"] == "foreach=True"


def test_an_optimizer_without_a_fused_version_is_named(job):
    job.change("optimizer:impl=fused")
    trained(lambda parameters: torch.optim.RMSprop(parameters))
    assert "RMSprop has no fused version" in job.refused()


def test_an_optimizer_of_the_script_is_changed_through_the_one_that_it_derives_from(job):
    class Mine(torch.optim.Adam):
        def __init__(self, params):
            super().__init__(params, lr=0.5)

    job.change("optimizer:impl=fused")
    optimizer, _ = trained(Mine)
    assert optimizer.defaults["fused"]
    assert job.places()[0]["where"].startswith("Mine at ")
