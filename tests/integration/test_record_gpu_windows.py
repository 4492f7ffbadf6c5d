"""Deep windows of real jobs whose GPU is a fake that is behind its host, and refuses to be synchronised."""

import textwrap

import polars as pl
import pytest

from dpro.schema import SPANS, STEPS, WORKERS
from tests.fake_gpu import FAKE_GPU
from tests.jobs import record, script

pytest.importorskip("torch")


def job(folder, body):
    return script(folder, FAKE_GPU + textwrap.dedent(body))


def test_window_on_a_gpu_has_exactly_its_steps_and_synchronises_nothing(tmp_path):
    body = """
    gpu.lag = 3
    for _ in range(24): train_step()
    """
    run, done = record(tmp_path, job(tmp_path, body), "--every", "12", "--window-steps", "2")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    steps = run.table(STEPS)
    assert steps.filter(window=0)["step"].to_list() == [5, 6]
    assert steps.filter(beside=0)["step"].to_list() == [4, 7, 8, 9]
    assert steps.filter(window=1)["step"].to_list() == [17, 18]
    spans = run.table(SPANS)
    assert dict(spans.filter(name="dpro::backward").group_by("window").len().iter_rows()) == {0: 2, 1: 2}
    inside = spans.join(
        steps.filter(pl.col("window") >= 0)
        .group_by("window")
        .agg(first=pl.col("start_ns").min(), last=(pl.col("start_ns") + pl.col("duration_ns")).max()),
        on="window",
    )
    assert (inside["start_ns"] >= inside["first"] - 1_000_000).all()  # our own time between steps
    assert (inside["start_ns"] < inside["last"] + 1_000_000).all()
    assert run.table(WORKERS)["gpu_name"].to_list() == ["Fake GPU"]
    [warning] = run.manifest.warnings  # Kineto saw the CPU only
    assert warning.startswith("2 deep windows (0, 1) of rank 0 have no work of Fake GPU")


@pytest.mark.slow
def test_capture_of_whole_steps_breaks_nothing_and_leaves_no_profiler_on(tmp_path):
    for warmups in (3, 5, 6, 7, 11):
        folder = tmp_path / str(warmups)
        folder.mkdir()
        body = f"""
        gpu.lag = 1
        for _ in range({warmups}): train_step()
        graph = new_graph()
        graph.capture_begin()
        train_step()
        graph.capture_end()
        print(torch._C._autograd._profiler_type().name)
        for _ in range(20): train_step()
        """
        run, done = record(folder, job(folder, body), "--every", "12")
        assert (done.returncode, done.stdout) == (0, b"NONE\n"), (warmups, done.stderr)
        assert run.table(STEPS).filter(pl.col("window") == 1)["step"].to_list() == [17, 18]


@pytest.mark.slow
def test_users_own_profiler_warms_up_at_every_offset_to_windows_on_a_gpu(tmp_path):
    body = """
    from torch.profiler import profile, schedule, ProfilerActivity
    torch.cuda.synchronize = lambda *_: None  # theirs may
    gpu.lag = 2
    seen = []
    def ready(profiler):
        seen.append(sum(event.name == "aten::addmm" for event in profiler.events()))
    for shift in range(7):
        for warmup in (1, 2, 3):
            cycle = schedule(wait=1, warmup=warmup, active=2)
            with profile(activities=[ProfilerActivity.CPU], schedule=cycle, on_trace_ready=ready) as profiler:
                for _ in range(2 * (3 + warmup)):
                    train_step()
                    profiler.step()
            for _ in range(9): train_step()
    print(seen)
    """
    run, done = record(tmp_path, job(tmp_path, body), "--every", "7", "--skip", "3")
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == str([2] * 42)
    per_window = run.table(STEPS).filter(pl.col("window") >= 0).group_by("window").len()
    assert per_window.height > 10
    assert set(per_window["len"]) == {2}


@pytest.mark.slow
def test_end_of_a_job_whose_gpu_hangs_is_not_held_up(tmp_path):
    body = """
    gpu.lag = 1000
    for _ in range(9): train_step()
    """
    run, done = record(tmp_path, job(tmp_path, body))
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert run.table(STEPS).filter(window=0)["step"].to_list() == [5, 6]
    assert any("deep window 0 of rank 0 has perhaps not all work" in text for text in run.manifest.warnings)


@pytest.mark.slow
def test_profiler_left_prepared_may_still_start_after_windows_of_ours(tmp_path):
    """Also where it was taken for forgotten: it is prepared again then, or the process would crash."""
    body = """
    from torch.profiler import profile, schedule, ProfilerActivity
    def ready(profiler):
        print(sum(event.name == "aten::addmm" for event in profiler.events()))
    late = schedule(wait=0, warmup=700, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=late, on_trace_ready=ready) as profiler:
        for _ in range(710):
            train_step()
            profiler.step()
    for _ in range(60): train_step()
    """
    run, done = record(tmp_path, script(tmp_path, body), "--every", "50")
    assert (done.returncode, done.stdout) == (0, b"2\n"), done.stderr
    windows = run.table(STEPS).filter(pl.col("window") >= 0)["step"].unique().sort().to_list()
    assert windows[0] > 500
    assert windows[-1] > 750
