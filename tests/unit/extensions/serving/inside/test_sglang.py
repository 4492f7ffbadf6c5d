"""SGLang's scheduler, of stand-ins with the attributes of version 0.5.23; never tried on a real one."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dpro.extensions.serving.inside.sglang import MAX_GONE, SglangHooks
from tests.served import Recorder


class Mode:
    def __init__(self, name):
        self.name = name

    def is_idle(self):
        return self.name == "IDLE"

    def is_extend(self):
        return self.name in ("EXTEND", "MIXED")

    def is_mixed(self):
        return self.name == "MIXED"


class Request:
    def __init__(self, name, prompt):
        self.rid, self.origin_input_ids, self.output_ids = name, [1] * prompt, []
        self.finished_reason = None

    def finished(self):
        return self.finished_reason is not None


class FINISH_LENGTH:  # its name in SGLang
    pass


def batch(mode, requests, tokens=None, cached=(), decoding=()):
    """A batch: requests, tokens of prompts, what of each prompt was cached, and what decodes with them."""
    return SimpleNamespace(
        forward_mode=Mode(mode), reqs=[*requests, *decoding], decoding_reqs=list(decoding) or None,
        extend_num_tokens=None if tokens is None else tokens + len(decoding), prefix_lens=list(cached),
        seq_lens_sum=sum(len(each.origin_input_ids) + len(each.output_ids) for each in requests),
    )  # fmt: skip


class Engine:
    """Classes of their own, hooked: hooks change them."""

    def __init__(self, folder, rank=0, without=()):
        class Scheduler:
            def __init__(self):
                self.waiting_queue, self.running_batch = [], SimpleNamespace(batch_is_full=False)

            def _add_request_to_queue(self, request, is_retracted=False):
                self.waiting_queue.append(request)

            def run_batch(self, batch):
                return "result"

            def process_batch_result(self, batch, result):
                for each in batch.reqs:
                    each.output_ids.append(7)

        class ScheduleBatch:
            def __init__(self, retracted):
                self.retracted = retracted

            def retract_decode(self):
                return self.retracted, 0.5, []

        class PrefillAdder:
            def add_one_req(self, result):
                return result

        for name in without:
            delattr(Scheduler, name)
        self.recorder = Recorder(folder)
        self.module = SimpleNamespace(
            Scheduler=Scheduler, ScheduleBatch=ScheduleBatch, PrefillAdder=PrefillAdder,
            get_parallel=lambda: SimpleNamespace(attn_tp_rank=rank, pp_rank=0, dp_rank=None),
        )  # fmt: skip
        self.hooks, self.scheduler = SglangHooks(self.recorder), Scheduler()

    def hook(self):
        self.hooks.on_scheduler(self.module)
        return self

    def step(self, *args, **kwargs):
        made = batch(*args, **kwargs)
        self.scheduler.process_batch_result(made, self.scheduler.run_batch(made))

    def tables(self):
        return self.recorder.tables()


@pytest.fixture
def engine(tmp_path):
    return Engine(tmp_path).hook()


def test_batches_have_their_kind_tokens_requests_and_context(engine):
    first, second = Request("a", 10), Request("b", 20)
    engine.step("EXTEND", [first], tokens=10, cached=[0])
    engine.step("MIXED", [second], tokens=8, cached=[12], decoding=[first])
    engine.step("IDLE", [])
    engine.step("DECODE", [first, second])
    found, _ = engine.tables()
    assert found.select("kind", "prefill_tokens", "decode_tokens", "num_requests").rows() == [
        ("prefill", 10, 0, 1), ("mixed", 8, 1, 2), ("decode", 0, 2, 2),
    ]  # fmt: skip
    assert found["context_tokens"].to_list()[-1] == 10 + 2 + 20 + 1
    assert engine.recorder.steps == 1


def test_a_request_has_its_moments_in_order_and_its_lengths(engine):
    request = Request("a", 20)
    engine.scheduler._add_request_to_queue(request)
    engine.step("EXTEND", [request], tokens=8, cached=[12])
    request.finished_reason = FINISH_LENGTH()
    engine.step("DECODE", [request])
    found, made = engine.tables()
    (row,) = made.to_dicts()
    assert 0 < row["arrival_ns"] <= row["scheduled_ns"] <= row["first_token_ns"] <= row["end_ns"]
    assert row["first_token_ns"] <= found["start_ns"][1]
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (20, 12, 2)
    assert (row["outcome"], row["evictions"]) == ("finished", 0)


def test_results_that_come_after_the_next_batch_belong_to_the_oldest(engine):
    request = Request("a", 4)
    batches = [batch("EXTEND", [request], 4, [0]), batch("DECODE", [request])]
    for each in batches:
        engine.scheduler.run_batch(each)
    for each in batches:
        engine.scheduler.process_batch_result(each, "result")
    found, _ = engine.tables()
    assert found["kind"].to_list() == ["prefill", "decode"]


def test_waiting_for_tokens_and_losing_them_are_recorded(engine):
    first, second = Request("a", 10), Request("b", 10)
    adder = engine.module.PrefillAdder()
    engine.step("EXTEND", [first, second], tokens=20, cached=[0, 0])
    engine.module.ScheduleBatch([second]).retract_decode()
    engine.scheduler._add_request_to_queue(second, is_retracted=True)
    adder.add_one_req(SimpleNamespace(name="NO_TOKEN"))
    engine.scheduler.running_batch.batch_is_full = True
    engine.step("DECODE", [first])
    engine.scheduler.waiting_queue.clear()
    adder.add_one_req(SimpleNamespace(name="CONTINUE"))
    engine.step("EXTEND", [second], tokens=11, cached=[0])
    second.finished_reason = FINISH_LENGTH()
    engine.step("DECODE", [second])
    found, made = engine.tables()
    assert found["kv_waiting"].to_list() == [0, 1, 0, 0]
    assert found["evicted"].to_list() == [0, 1, 0, 0]
    row = made.filter(name="b").to_dicts()[0]
    assert row["evictions"] == 1
    assert row["evicted_ns"] > 0


def test_of_ranks_that_share_requests_the_first_records_them(tmp_path):
    engine = Engine(tmp_path, rank=1).hook()
    request = Request("a", 4)
    engine.scheduler._add_request_to_queue(request)
    engine.step("EXTEND", [request], tokens=4, cached=[0])
    found, made = engine.tables()
    assert (found.height, made.height) == (1, 0)
    assert not engine.hooks._arrivals


def test_arrivals_of_requests_that_never_run_are_forgotten(engine):
    for number in range(MAX_GONE + 2):
        engine.scheduler._add_request_to_queue(Request(f"r{number}", 4))
    engine.scheduler.waiting_queue.clear()
    engine.step("EXTEND", [Request("a", 4)], tokens=4, cached=[0])
    assert not engine.hooks._arrivals


def test_a_version_without_these_methods_is_left_alone(tmp_path):
    engine = Engine(tmp_path, without=["process_batch_result"])
    before = dict(vars(engine.module.Scheduler))
    with pytest.raises(LookupError, match="no process_batch_result"):
        engine.hooks.on_scheduler(engine.module)
    assert dict(vars(engine.module.Scheduler)) == before
