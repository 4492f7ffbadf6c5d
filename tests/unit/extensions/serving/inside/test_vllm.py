"""vLLM's scheduler, of stand-ins with the attributes of versions 0.32 and 0.33."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from _dpro_inside_the_job.recorder import AwaitedModules

from dpro.collectors.convert.served import write_engines
from dpro.collectors.launch.recording import Launch
from dpro.extensions.serving.inside import served
from dpro.extensions.serving.inside.vllm import VllmHooks
from dpro.schema import ITERATIONS, REQUESTS
from dpro.store import Manifest, open_run, write_manifest
from tests.served import Recorder


class Request:
    def __init__(self, name, prompt, made=0):
        self.request_id, self.num_prompt_tokens, self.num_output_tokens = name, prompt, made
        self.arrival_time, self.reason = time.time(), None

    def is_finished(self):
        return self.reason is not None

    def get_finished_reason(self):
        return self.reason


def planned(new=(), cached=(), resumed=()):
    """A batch: new requests (name, tokens, cached tokens), others (name, tokens, tokens before, made)."""
    lengths = {name: tokens for name, tokens, *_ in [*new, *cached]}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=found) for n, _, found in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, *_ in cached],
            num_computed_tokens=[before for _, _, before, _ in cached],
            num_output_tokens=[made for *_, made in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=lengths,
        total_num_scheduled_tokens=sum(lengths.values()),
        scheduled_spec_decode_tokens={},
    )


def said(*outputs):
    """What a batch gave: (name, tokens, why it ended or None)."""
    rows = [
        SimpleNamespace(request_id=n, new_token_ids=tokens, finish_reason=why) for n, tokens, why in outputs
    ]
    return {0: SimpleNamespace(outputs=rows)}


class Engine:
    """Classes of their own, hooked: hooks change them."""

    def __init__(self, recorder, without=()):
        class Scheduler:
            vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_index=1, data_parallel_rank=1, world_size=2)
            )

            def __init__(self):
                self.requests, self.waiting, self.plans = {}, [], []

            def schedule(self, throttle_prefills=False):
                plan = self.plans.pop(0)
                return plan() if callable(plan) else plan

            def update_from_output(self, scheduler_output, model_runner_output):
                return model_runner_output

            def finish_requests(self, request_ids, finished_status):
                ended = [self.requests[name] for name in request_ids]
                for each in ended:
                    each.reason = finished_status
                return ended

            def _preempt_request(self, request, timestamp):
                self.waiting.append(request)

        class KVCacheManager:
            def allocate_slots(self, request, num_new_tokens):
                return None if num_new_tokens > 100 else ["block"]

        class Worker:
            def execute_model(self, scheduler_output):
                return "output"

        for name in without:
            delattr(Scheduler, name)
        self.recorder, self.hooks = recorder, VllmHooks(recorder)
        self.scheduler, self.manager, self.worker = Scheduler(), KVCacheManager(), Worker()
        self.module = SimpleNamespace(Scheduler=Scheduler, KVCacheManager=KVCacheManager)

    def hook(self):
        self.hooks.on_scheduler(self.module)
        self.hooks.on_worker(SimpleNamespace(Worker=type(self.worker)))
        return self

    def add(self, *requests):
        self.scheduler.requests |= {each.request_id: each for each in requests}

    def step(self, plan, result):
        self.scheduler.plans = [plan]
        output = self.scheduler.schedule()
        assert self.worker.execute_model(output) == "output"
        assert self.scheduler.update_from_output(output, result) is result

    def tables(self):
        return self.recorder.tables()


@pytest.fixture
def engine(tmp_path):
    return Engine(Recorder(tmp_path)).hook()


def test_batches_have_their_kind_tokens_requests_and_context(engine):
    engine.add(Request("a", 10), Request("b", 20))
    engine.scheduler.waiting = ["c"]
    engine.step(planned(new=[("a", 10, 0)]), said(("a", [5], None)))
    engine.step(
        planned(new=[("b", 8, 12)], cached=[("a", 1, 10, 1)]), said(("a", [5], None), ("b", [6], None))
    )
    engine.step(planned(cached=[("a", 1, 11, 2), ("b", 1, 20, 1)]), said())
    engine.step(planned(cached=[("a", 1, 12, 3), ("b", 6, 0, 2)], resumed=["b"]), said())
    found, _ = engine.tables()
    columns = ("kind", "prefill_tokens", "decode_tokens", "num_requests", "context_tokens", "waiting")
    assert found.select(columns).rows() == [
        ("prefill", 10, 0, 1, 10, 1), ("mixed", 8, 1, 2, 31, 1), ("decode", 0, 2, 2, 33, 1),
        ("mixed", 6, 1, 2, 19, 1),
    ]  # fmt: skip
    assert engine.recorder.steps == 1  # they follow each other within less than a step
    assert found["replica"].unique().to_list() == [1]


def test_a_part_of_a_prompt_counts_as_prompt_though_it_is_one_token(engine):
    engine.add(Request("a", 3))
    engine.step(planned(new=[("a", 2, 0)]), said())
    engine.step(planned(cached=[("a", 1, 2, 0)]), said(("a", [5], None)))
    found, _ = engine.tables()
    assert found.select("prefill_tokens", "decode_tokens").rows() == [(2, 0), (1, 0)]


def test_a_request_has_its_moments_in_order_and_its_lengths(engine):
    request = Request("a", 20)
    engine.add(request)
    engine.step(planned(new=[("a", 8, 12)]), said(("a", [5], None)))
    request.num_output_tokens = 2
    engine.step(planned(cached=[("a", 1, 20, 1)]), said(("a", [5], "length")))
    found, made = engine.tables()
    (row,) = made.to_dicts()
    assert row["arrival_ns"] <= row["scheduled_ns"] <= row["first_token_ns"] <= row["end_ns"]
    assert row["first_token_ns"] <= found["start_ns"][1]
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (20, 12, 2)
    assert (row["outcome"], row["evictions"], row["replica"]) == ("finished", 0, 1)


def test_batches_scheduled_ahead_end_in_order_and_empty_ones_are_none(engine):
    engine.add(Request("a", 4))
    plans = [planned(new=[("a", 4, 0)]), planned(), planned(cached=[("a", 1, 4, 1)])]
    engine.scheduler.plans = list(plans)
    outputs = [engine.scheduler.schedule() for _ in plans]
    for output in outputs:
        engine.scheduler.update_from_output(output, said())
    found, _ = engine.tables()
    assert found["kind"].to_list() == ["prefill", "decode"]
    assert found["start_ns"][1] >= found["start_ns"][0] + found["duration_ns"][0]


def test_waiting_for_blocks_and_losing_them_are_recorded(engine):
    first, second = Request("a", 10), Request("b", 10)
    engine.add(first, second)
    engine.step(planned(new=[("a", 10, 0), ("b", 10, 0)]), said(("a", [1], None), ("b", [1], None)))

    def lacks():
        assert engine.manager.allocate_slots(first, 1) == ["block"]
        assert engine.manager.allocate_slots(first, 500) is None
        engine.scheduler._preempt_request(second, 0.0)
        return planned(cached=[("a", 1, 10, 1)])

    engine.step(lacks, said(("a", [1], None)))
    engine.scheduler.waiting = []
    time.sleep(0.002)
    engine.step(planned(cached=[("b", 11, 0, 1)], resumed=["b"]), said(("b", [1], "stop")))
    found, made = engine.tables()
    assert found["kv_waiting"].to_list() == [0, 1, 0]
    assert found["evicted"].to_list() == [0, 1, 0]
    assert found["kind"].to_list() == ["prefill", "decode", "prefill"]  # computed again
    evicted = made.filter(name="b").to_dicts()[0]
    assert evicted["evictions"] == 1
    ends = found["start_ns"] + found["duration_ns"]
    assert 2_000_000 <= evicted["evicted_ns"] <= found["start_ns"][2] - ends[0]
    assert made.filter(name="a")["evicted_ns"].to_list() == [0]


def test_a_request_that_was_given_up_before_it_ran_is_aborted(engine):
    engine.add(Request("a", 10), Request("b", 10))
    engine.step(planned(new=[("a", 10, 0)]), said(("a", [1], None)))
    engine.scheduler.finish_requests(["a", "b"], "abort")
    _, made = engine.tables()
    assert sorted(made.select("name", "outcome").rows()) == [("a", "aborted"), ("b", "aborted")]
    assert made.filter(name="b")["scheduled_ns"].to_list() == [-1]


def test_an_engine_without_a_rank_writes_beside_its_workers_and_ends_no_steps(tmp_path):
    launch = Launch(tmp_path / "run", "launch")
    launch.raw.mkdir(parents=True)
    recorder = Recorder(tmp_path)
    recorder.folder = recorder.records = None
    recorder.launch = launch.raw
    engine = Engine(recorder).hook()
    engine.add(Request("a", 4))
    engine.step(planned(new=[("a", 4, 0)]), said(("a", [1], "stop")))
    engine.hooks._served._on_exit()
    assert recorder.steps == 0
    write_engines(launch)
    write_manifest(launch.run, Manifest(world_size=4, ranks=[2]))
    found = open_run(launch.run)
    assert found.table(ITERATIONS).select("rank", "replica", "prefill_tokens").rows() == [(2, 1, 4)]
    assert found.table(REQUESTS).select("name", "replica", "outcome").rows() == [("a", 1, "finished")]


def test_iterations_end_steps_and_calls_of_a_worker_beside_them_do_not(engine, monkeypatch):
    monkeypatch.setattr(served, "SHORT_NS", 0)
    engine.add(Request("a", 4))
    engine.step(planned(new=[("a", 4, 0)]), said(("a", [1], None)))
    engine.step(planned(cached=[("a", 1, 4, 1)]), said())
    assert engine.recorder.steps == 2


def test_a_worker_alone_ends_a_step_with_each_batch(engine):
    engine.worker.execute_model(planned())
    engine.worker.execute_model(planned(new=[("a", 4, 0)]))
    assert engine.recorder.steps == 1


def test_a_version_without_these_methods_is_left_alone(tmp_path):
    engine = Engine(Recorder(tmp_path), without=["update_from_output"])
    before = dict(vars(engine.module.Scheduler))
    with pytest.raises(LookupError, match="no update_from_output"):
        engine.hooks.on_scheduler(engine.module)
    assert dict(vars(engine.module.Scheduler)) == before


def test_damaged_facts_of_an_engine_count_nothing(tmp_path):
    launch = Launch(tmp_path, "launch")
    folder = launch.raw / "engine-host-1"
    folder.mkdir(parents=True)
    for text in ("{", "[]", '{"rank": "a", "pid": 3}', '{"rank": -1, "pid": 3}'):
        (folder / "engine.json").write_text(text)
        write_engines(launch)
    assert not (tmp_path / ITERATIONS.name).exists()


def test_a_module_is_met_when_the_job_has_imported_it_and_not_before(tmp_path, monkeypatch):
    (tmp_path / "dpro_awaited.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "dpro_awaited", raising=False)
    met, awaited = [], AwaitedModules()
    awaited.add("dpro_awaited", lambda module: met.append(module.value))
    try:
        assert met == []
        import dpro_awaited

        assert met == [3]
        awaited.add("dpro_awaited", lambda module: met.append(module.__name__))
        assert met == [3, "dpro_awaited"]
        assert dpro_awaited.__spec__.name == "dpro_awaited"
    finally:
        sys.meta_path.remove(awaited)
        sys.modules.pop("dpro_awaited", None)


def test_a_module_that_fails_to_import_fails_as_before(tmp_path, monkeypatch):
    (tmp_path / "dpro_failing.py").write_text("raise ValueError('its own')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    met, awaited = [], AwaitedModules()
    awaited.add("dpro_failing", met.append)
    awaited.add("dpro_not_there", met.append)
    try:
        with pytest.raises(ValueError, match="its own"):
            import dpro_failing  # noqa: F401
        with pytest.raises(ModuleNotFoundError, match="dpro_not_there"):
            import dpro_not_there  # noqa: F401
    finally:
        sys.meta_path.remove(awaited)
    assert met == []


def test_lines_of_requests_are_json(engine):
    engine.add(Request("a", 4))
    engine.step(planned(new=[("a", 4, 0)]), said(("a", [1], "stop")))
    engine.tables()
    lines = (engine.recorder.folder / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["a", "a"]
