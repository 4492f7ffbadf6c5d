"""Training loops of torch alone, in the words of the jobs that run them, and how such jobs are recorded."""

import os
from pathlib import Path

from dpro.schema import COUNTERS, SPANS, STEPS
from dpro.store import Run

ROOT = Path(__file__).parents[1]
EVERY, WINDOW_STEPS, SKIP = 6, 2, 3

# One rank each; `step()` trains once.
ALONE = {
    "compiled": """
        compiled = torch.compile(model, backend="eager")
        update = torch.compile(update, backend="eager")
        for _ in range(12):
            compiled(data).sum().backward()
            update()
    """,
    "accumulation": """
        for _ in range(12):
            for _ in range(4):
                loss().backward()
            update()
    """,
    "two_optimizers": """
        other = SGD(nn.Linear(4, 4).parameters(), lr=0.1)
        for _ in range(12):
            step()
            other.step()
    """,
    "gan": """
        critic = nn.Linear(4, 4)
        critics = SGD(critic.parameters(), lr=0.1)
        for _ in range(12):
            for _ in range(3):
                critic(data).sum().backward()
                critics.step()
            step()
    """,
    "scaler": """
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(12):
            optimizer.zero_grad()
            scaler.scale(loss() * (math.inf if number % 3 == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "evaluation": """
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for number in range(12):
            step()
            scheduler.step()
            if number % 4 == 3:
                model.eval()
                with torch.no_grad():
                    for _ in range(5):
                        loss()
                model.train()
    """,
    "group_after_group": """
        for _ in range(12):
            for _ in range(2):
                loss().backward()
            for _ in range(3):
                optimizer.step()
            optimizer.zero_grad()
    """,
    "gradients_of_its_own": """
        for _ in range(12):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    """,
    "lbfgs": """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        def closure():
            optimizer.zero_grad()
            value = loss().square()
            value.backward()
            return value
        for _ in range(12):
            optimizer.step(closure)
    """,
    "optimizer_in_backward": """
        optimizers = {p: SGD([p], lr=0.01) for p in model.parameters()}
        def hook(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(12):
            loss().backward()
    """,
    "another_optimizer": """
        for _ in range(3):
            for _ in range(4):
                step()
            optimizer = None
            gc.collect(0)
            optimizer = SGD(model.parameters(), lr=0.1)
    """,
    "zero_redundancy": """
        from torch.distributed.optim import ZeroRedundancyOptimizer
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
        for _ in range(12):
            step()
        dist.destroy_process_group()
    """,
    "killed": """
        for _ in range(12):
            step()
        time.sleep(2)  # steps that end within 10 ms of a write are written within a second
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    "range": """
        for _ in range(12):
            with torch.profiler.record_function("dpro::step"):
                for _ in range(2):
                    step()
    """,
    "range_beside": """
        for _ in range(12):
            for _ in range(2):
                step()
            with torch.profiler.record_function("dpro::step"):
                pass
    """,
    "function": """
        for number in range(13):
            sys.modules["__main__"].iteration(model)
    """,
    "inference": """
        inference.PATIENCE_S, inference.LOOK_S = 0.0, 0.02
        model.eval()
        with torch.inference_mode():
            while not model._compiled_call_impl:
                model(torch.ones(2000, 4))
            for _ in range(13):
                model(data)
    """,
    # As Megatron's pipelines: a stage frees what it has sent on, so that gradients are asked of the engine
    # itself; many micro-batches, and a first forward pass in which the model is found.
    "megatron": """
        inference.PATIENCE_S, inference.LOOK_S = 0.0, 0.02
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        engine = torch.autograd.Variable._execution_engine
        def backward(output, gradient):
            engine.run_backward(
                (output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        while not model._compiled_call_impl:
            model(torch.ones(2000, 4))
        for _ in range(12):
            sent = []
            for _ in range(20):
                output = model(data)
                gradient = torch.ones_like(output)
                output.data = torch.empty(1)
                sent.append((output, gradient))
            for output, gradient in sent:
                backward(output, gradient)
            update()
        assert model._compiled_call_impl is None
    """,
    "evaluation_that_is_followed_by_training": """
        inference.PATIENCE_S, inference.LOOK_S = 0.0, 0.02
        model.eval()
        with torch.no_grad():
            while not model._compiled_call_impl:
                model(torch.ones(2000, 4))
            model(data)
        for _ in range(12):
            step()
        assert model._compiled_call_impl is None
    """,
}


# Two ranks each.
TOGETHER = {
    "ddp": """
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-5)
        for _ in range(12):
            with ddp.no_sync():
                ddp(data).sum().backward()
            ddp(data).sum().backward()
            update()
    """,
    "extra_optimizer": """
        ddp = nn.parallel.DistributedDataParallel(model)
        extra = nn.Parameter(torch.zeros(()))
        extras = SGD([extra], lr=0.1)
        for number in range(12):
            ddp(data).sum().backward()
            update()
            if dist.get_rank() == 0 and number % 5 == 2:
                extra.square().backward()
                extras.step()
    """,
    "large_extra_optimizer": """
        ddp = nn.parallel.DistributedDataParallel(model)
        extra = nn.Linear(64, 4)
        extras = SGD(extra.parameters(), lr=0.1)
        for number in range(42):  # a few steps are too few to detect the main optimizer
            ddp(data).sum().backward()
            update()
            if dist.get_rank() == 0 and number % 5 == 2:
                extra(torch.ones(2, 64)).sum().backward()
                extras.step()
    """,
    "fsdp": """
        from torch.distributed.fsdp import fully_shard
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            step()
    """,
    "pipeline": """
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        stage = PipelineStage(model[2 * rank], rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
        optimizer = SGD(model[2 * rank].parameters(), lr=0.1)
        batch = torch.ones(8, 4)
        for _ in range(12):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(batch)
            else:
                schedule.step(target=batch)
            optimizer.step()
    """,
    "tensor_parallel": """
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            step()
    """,
    "fsdp_and_tensor_parallel": """
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        warnings.simplefilter("ignore")  # torch warns about views that torch itself makes
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(model, nn.Linear(4, 4))
        parallelize_module(model[0], mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model[0], mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = SGD(model.parameters(), lr=0.1)
        for _ in range(12):
            model(data).sum().backward()
            update()
    """,
}


def environment() -> dict[str, str]:
    """The environment of a job that no launcher has begun."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD"))}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}


def check_that_ranks_agree(run: Run) -> None:
    """Two ranks that trained twelve times have the same steps and windows."""
    steps = run.table(STEPS)
    first, second = (steps.filter(rank=rank).select("step", "window") for rank in (0, 1))
    assert first.equals(second)
    assert first["step"].to_list() == list(range(1, 12))
    assert set(first["window"]) == {-1, 0, 1}
    assert set(run.table(SPANS)["window"]) == {0, 1}


def values(run: Run, counter: str) -> set[float]:
    """The values that a counter has had."""
    return set(run.table(COUNTERS).filter(counter=counter)["value"])
