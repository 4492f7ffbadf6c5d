"""Continuous batching of transformers, of stand-ins with the attributes of version 5.23."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.convert.served import requests
from dpro.extensions.serving.inside import served
from dpro.extensions.serving.inside.transformers import PACKAGE, TransformersHooks
from dpro.schema import REQUESTS, conform
from tests.served import Recorder


def state(name, prompt, made=0):
    return SimpleNamespace(
        request_id=name, initial_tokens=[1] * prompt, generated_tokens=[2] * made, position_offset=0,
        created_time=time.perf_counter(), status=SimpleNamespace(name="DECODING"),
    )  # fmt: skip


class Engine:
    """Classes of their own, hooked: hooks change them."""

    def __init__(self, folder, monkeypatch):
        class Scheduler:
            def __init__(self):
                self.active_requests, self.waiting_requests = {}, {}

            def finish_request(self, request_id):
                self.active_requests.pop(request_id)

            def clear_cancelled_requests(self):
                return []

            def _try_to_meet_safety_margin(self):
                return not self.waiting_requests

            def _process_candidates(self, lacks):
                self._try_to_meet_safety_margin()
                return [], lacks, False, 0, 0

        class OffloadingManager:
            def offload_requests(self, scheduler, request):
                scheduler.finish_request(request.request_id)
                scheduler.waiting_requests[request.request_id] = request
                return True

        class ContinuousBatchingIOs:
            def prepare_batch_tensors(self, requests_in_batch, use_padding):
                for each in requests_in_batch:
                    each.state.position_offset += each.query_length

        class ContinuousBatchProcessor:
            input_queue, lacking = object(), None

            def __init__(self, scheduler, batches):
                self.scheduler, self.batches, self.tensors = scheduler, batches, ContinuousBatchingIOs()

            def prepare_next_batch(self):
                self.scheduler._process_candidates(self.lacking is not None)
                if self.lacking is not None:
                    OffloadingManager().offload_requests(self.scheduler, self.lacking)
                    self.lacking = None
                if self.batches:
                    batch = self.batches.pop(0)
                    self.scheduler.active_requests |= {each.state.request_id: each.state for each in batch}
                    self.tensors.prepare_batch_tensors(requests_in_batch=batch, use_padding=False)
                    return True
                return False

            def update_batch(self):
                return "updated"

        modules = {
            "continuous_api": ContinuousBatchProcessor,
            "input_outputs": ContinuousBatchingIOs,
            "scheduler": Scheduler,
            "offloading_manager": OffloadingManager,
        }
        for name, owner in modules.items():
            module = SimpleNamespace(**{owner.__name__: owner})
            monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", module)
        self.recorder = Recorder(folder)
        self.hooks = TransformersHooks(self.recorder)
        self.hooks.look()
        self.hooks.look()
        self.make = lambda *batches: ContinuousBatchProcessor(Scheduler(), list(batches))

    def tables(self):
        return self.recorder.tables()


@pytest.fixture
def engine(tmp_path, monkeypatch):
    return Engine(tmp_path, monkeypatch)


def part(request, length, has_new_token=True):
    return SimpleNamespace(state=request, query_length=length, has_new_token=has_new_token)


def test_batches_have_their_kind_tokens_requests_and_context(engine):
    first, second = state("a", 10), state("b", 6)
    processor = engine.make(
        [part(first, 10)], [part(first, 1), part(second, 4, False)], [part(first, 1), part(second, 2)]
    )
    for _ in range(3):
        assert processor.prepare_next_batch()
        assert processor.update_batch() == "updated"
    found, _ = engine.tables()
    columns = ("kind", "prefill_tokens", "decode_tokens", "num_requests", "context_tokens", "waiting")
    assert found.select(columns).rows() == [
        ("prefill", 10, 0, 1, 10, 0), ("mixed", 4, 1, 2, 15, 0), ("mixed", 2, 1, 2, 18, 0),
    ]  # fmt: skip
    assert engine.recorder.steps == 1  # they follow each other within less than a step


@pytest.mark.parametrize(("short_ns", "ranks", "steps"), [(0, 1, 3), (10**12, 1, 1), (10**12, 2, 3)])
def test_iterations_share_a_step_unless_they_take_long_or_other_ranks_have_the_same(
    engine, monkeypatch, short_ns, ranks, steps
):
    monkeypatch.setattr(served, "SHORT_NS", short_ns)
    monkeypatch.setattr(served, "identity", lambda: (0, ranks))
    request = state("a", 4)
    processor = engine.make([part(request, 4)], [part(request, 1)], [part(request, 1)])
    for _ in range(3):
        processor.prepare_next_batch()
        processor.update_batch()
    assert engine.recorder.steps == steps
    assert engine.tables()[0].height == 3


def test_a_request_has_its_moments_in_order_and_its_lengths(engine):
    request = state("a", 10)
    processor = engine.make([part(request, 8, False)], [part(request, 2)], [part(request, 1)])
    for _ in range(3):
        processor.prepare_next_batch()
        processor.update_batch()
    request.generated_tokens, request.status.name = [1, 2], "FINISHED"
    processor.scheduler.finish_request("a")
    found, made = engine.tables()
    (row,) = made.to_dicts()
    assert row["arrival_ns"] <= row["scheduled_ns"] <= row["first_token_ns"] <= row["end_ns"]
    ends = (found["start_ns"] + found["duration_ns"]).to_list()
    assert ends[0] < row["first_token_ns"] <= ends[1]  # the first part of the prompt gave no token
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (10, 0, 2)
    assert row["outcome"] == "finished"


def test_of_batches_prepared_ahead_the_oldest_ends_first_and_none_overlap(engine):
    request = state("a", 4)
    processor = engine.make([part(request, 4)], [part(request, 1)], [part(request, 1)])
    processor.prepare_next_batch()
    for _ in range(2):
        processor.prepare_next_batch()
        processor.update_batch()
    processor.update_batch()
    processor.update_batch()  # there is none left
    found, _ = engine.tables()
    assert found["kind"].to_list() == ["prefill", "decode", "decode"]
    ends = found["start_ns"] + found["duration_ns"]
    assert (found["start_ns"][1:] >= ends[:-1]).all()


def test_a_request_that_was_begun_and_not_ended_is_unknown(engine):
    processor = engine.make([part(state("a", 4), 4)])
    processor.prepare_next_batch()
    processor.update_batch()
    _, made = engine.tables()
    assert made.select("outcome", "output_tokens", "end_ns").rows() == [("unknown", -1, -1)]


def test_a_line_that_was_cut_off_counts_nothing(engine, tmp_path):
    lines = [{"name": "a", "arrival_ns": 5, "prompt_tokens": 3}, {"name": "a", "arrival_ns": 5, "end_ns": 9}]
    text = "".join(json.dumps(each) + "\n" for each in lines) + '{"name": "b", "arr'
    (tmp_path / "requests.jsonl").write_text(text)
    found = conform(REQUESTS, requests(RecordedProcess(tmp_path, {"rank": 0})))
    assert found.select("name", "arrival_ns", "end_ns").rows() == [("a", 5, 9)]


def test_a_request_that_is_moved_out_of_the_cache_has_not_ended(engine):
    first, second = state("a", 4), state("b", 4)
    processor = engine.make(
        [part(first, 4), part(second, 4)], [part(first, 1)], [part(first, 1), part(second, 5)]
    )
    processor.prepare_next_batch()
    processor.update_batch()
    second.status.name = "FINISHED"  # as it is before another state takes its place
    processor.lacking = second
    processor.prepare_next_batch()
    processor.update_batch()
    processor.scheduler.waiting_requests.clear()
    second.status.name, second.position_offset, second.generated_tokens = "DECODING", 0, [7, 7]
    processor.prepare_next_batch()
    processor.update_batch()
    second.status.name = "FINISHED"
    processor.scheduler.finish_request("b")
    found, made = engine.tables()
    assert found.select("waiting", "kv_waiting", "evicted").rows() == [(0, 0, 0), (1, 1, 1), (0, 0, 0)]
    (row,) = made.filter(name="b").to_dicts()
    assert (row["evictions"], row["output_tokens"], row["outcome"]) == (1, 2, "finished")
    assert 0 < row["evicted_ns"] <= found["start_ns"][2] - found["start_ns"][1]


def test_requests_wait_for_blocks_where_few_are_free(engine):
    processor = engine.make([part(state("a", 4), 4)], [part(state("c", 4), 4)])
    processor.scheduler.waiting_requests["b"] = state("b", 4)
    processor.prepare_next_batch()
    processor.update_batch()
    processor.scheduler.waiting_requests.clear()
    processor.prepare_next_batch()
    processor.update_batch()
    assert engine.tables()[0]["kv_waiting"].to_list() == [1, 0]


def test_a_version_without_these_methods_is_left_alone(tmp_path, monkeypatch):
    for name in ("continuous_api", "input_outputs", "scheduler"):
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", SimpleNamespace())
    TransformersHooks(Recorder(tmp_path)).look()
