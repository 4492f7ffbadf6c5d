"""A codec for each bucket, by hand on a made-up DDP job of three buckets."""

from __future__ import annotations

import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.whatif.choices import Codec, choose, codec_of
from dpro.replay.whatif.edits.gradients import Compress
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.graph_ops.reductions import reductions_of
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.ddp import KB, ddp_job
from tests.edits import steps_us

US = 1000
# Gradients of 128 KB, 128 KB and 1 MB are ready 1000 us apart. Their reductions take 512, 512 and 4096 us.
SIZES = (128, 128, 1024)
NORM = 100.0
BF16, FP16 = Codec(to="bf16"), Codec(to="fp16")


def graph_of(folder, measured, sizes=SIZES):
    """Its graph; `measured`: by codec the square errors of the buckets, and the time to compress, us."""
    run = ddp_job(SIZES, (0, 1, 2))
    for codec, (errors, encode_us) in measured.items():
        for rank in (0, 1):
            for bucket, error in enumerate(errors):
                row = {"rank": rank, "step": 5, "module": 0, "bucket": bucket, "codec": codec}
                row |= {"names": [f"layer{2 - bucket}"], "elements": sizes[bucket] * KB // 4}
                row |= {"square_norm": NORM, "square_error": error}
                run.rows["codecs"].append(row | {"encode_ns": encode_us * US, "decode_ns": 0})
    run.write(folder / "run")
    return build_graph(open_run(folder / "run")).graph


def codecs(graph, budget):
    return [each.option.codec for each in choose(reductions_of(graph), budget)]


def test_only_the_bucket_that_the_step_waits_for_is_compressed(tmp_path):
    graph = graph_of(tmp_path, {"to=bf16": ([1.0, 1.0, 1.0], 0)})
    assert codecs(graph, 0.5) == [None, None, BF16]
    was, now = steps_us(graph)[1], steps_us(graph, "compress:budget=0.5")[1]
    assert was - now == pytest.approx(2048, abs=30)


def test_of_codecs_as_fast_the_one_that_loses_less_is_taken(tmp_path):
    graph = graph_of(tmp_path, {"to=bf16": ([1.0] * 3, 0), "to=fp16": ([0.5] * 3, 0)})
    assert codecs(graph, 0.5) == [None, None, FP16]


def test_what_compressing_takes_is_weighed(tmp_path):
    graph = graph_of(tmp_path, {"to=bf16": ([1.0] * 3, 3000)})
    assert codecs(graph, 0.5) == [None, None, None]
    assert parse_edit("compress:budget=0.5").apply(graph) is graph


@pytest.mark.parametrize(("budget", "expected"), [(0.06, BF16), (0.05, None)])
def test_the_error_is_that_of_all_gradients(tmp_path, budget, expected):
    # sqrt(1 / 300) = 0.0577 is lost of all of them.
    graph = graph_of(tmp_path, {"to=bf16": ([1.0] * 3, 0)})
    assert codecs(graph, budget)[2] == expected


def test_powersgd_is_left_out_where_it_would_crash(tmp_path):
    graph = graph_of(tmp_path, {"powersgd_rank=4": ([0.0] * 3, 0)})
    assert codecs(graph, 0.5) == [None, None, None]


def test_without_a_probe_it_is_refused_with_how_to_get_one(tmp_path):
    graph = graph_of(tmp_path, {})
    with pytest.raises(Unanswerable, match="dpro try compress:probe"):
        parse_edit("compress:budget=0.1").apply(graph)


def test_measurements_of_other_buckets_are_refused(tmp_path):
    graph = graph_of(tmp_path, {"to=bf16": ([1.0] * 3, 0)}, sizes=(128, 512, 1024))
    with pytest.raises(Unanswerable, match="other sizes"):
        parse_edit("compress:budget=0.1").apply(graph)


def test_what_was_chosen_is_said(tmp_path):
    notes = parse_edit("compress:budget=0.5").notes(graph_of(tmp_path, {"to=bf16": ([1.0] * 3, 0)}))
    assert notes[:2] == (
        "2 of 3 buckets as they are (layer2 to layer1)",
        "1 of 3 buckets by to=bf16 (layer0), which loses at most 0.1 of each",
    )


def test_codecs_are_written_as_the_edit_takes_them():
    for text in ("to=fp16", "powersgd_rank=4", "topk=0.01"):
        assert str(codec_of(text)) == text
    with pytest.raises(UsageError):
        codec_of("zip=1")
    for text in ("to=gzip", "powersgd_rank=x", "topk=most", ""):
        with pytest.raises(UsageError, match="no codec"):
            codec_of(text)


def test_a_damaged_probe_is_refused_and_decides_nothing(tmp_path):
    for number, error in enumerate((float("nan"), -1.0)):
        graph = graph_of(tmp_path / str(number), {"to=bf16": ([error] * 3, 0)})
        with pytest.raises(Unanswerable, match="no row of table codecs has"):
            codecs(graph, 0.5)
    with pytest.raises(Unanswerable, match="no row of table codecs has"):
        codecs(graph_of(tmp_path / "times", {"to=bf16": ([1.0] * 3, -1)}), 0.5)


def test_choices_are_searched_where_codecs_were_measured(tmp_path):
    graph = graph_of(tmp_path, {"to=bf16": ([1.0] * 3, 0)})
    found = [str(each) for each in Compress.candidates(facts_of(graph))]
    assert "compress:budget=0.01" in found
