"""Changes to recovery as they are written, rates of failures, and what both predict."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import polars as pl
import pytest

from dpro.errors import InputError, Unanswerable, UsageError
from dpro.extensions.goodput.life import life_of
from dpro.extensions.goodput.outlook import (
    DESIGNS,
    candidates,
    changed,
    predict_goodput,
    with_replayed_step,
    young_daly,
)
from dpro.extensions.goodput.simulate import Recovery
from dpro.extensions.goodput.stages import (
    PRESETS,
    FailureRate,
    ObservedFailures,
    own_rate,
    rate_of_log,
    rate_per_gpu,
    read_log,
    stages_of,
)
from tests.commands import dpro, refused
from tests.lives import WrittenAttempt, job, ns

JOB = Recovery(
    step_s=2, every=500, stall_s=30, background_s=0, start_s=300, down_s=60, detect_s=600, hosts=64, warm_s=60
)


@pytest.mark.parametrize("name", DESIGNS)
def test_each_change_is_what_its_example_says_and_changes_something(name):
    assert changed(JOB, DESIGNS[name].example) != JOB


def test_changes_that_do_not_exist_or_lack_a_value_say_what_there_is():
    with pytest.raises(UsageError, match="did you mean 'checkpoint'"):
        changed(JOB, "checkpoints:every=3")
    with pytest.raises(UsageError, match="async needs stall, as in async:stall=2"):
        changed(JOB, "async")
    with pytest.raises(UsageError, match="s must be from 0 to 1,000,000,000, not -1"):
        changed(JOB, "detect:s=-1")


def test_save_in_the_background_hides_what_does_not_stall():
    found = changed(JOB, "async:stall=4")
    assert (found.stall_s, found.background_s) == (4, 26)


def test_warm_caches_leave_a_share_of_the_warm_up():
    found = changed(JOB, "caches:left=0.25")
    assert (found.start_s, found.warm_s) == (300 - 45, 15)


def test_shards_take_each_rank_its_share_of_the_time_to_save():
    found = changed(replace(JOB, writers=2, background_s=8), "sharded:ranks=8")
    assert (found.stall_s, found.background_s, found.writers) == (7.5, 2, 8)
    assert changed(found, "sharded:ranks=8") == found


def test_no_more_ranks_write_shards_than_the_job_has():
    small = replace(JOB, ranks=128)
    with pytest.raises(UsageError, match="the job has 128 ranks, so 129 cannot write"):
        changed(small, "sharded:ranks=129")
    assert changed(small, "sharded:ranks=128").writers == 128
    assert changed(changed(small, "hosts:count=128"), "sharded:ranks=256").writers == 256


def test_smaller_job_is_as_slow_as_given():
    found = changed(JOB, "smaller:replicas=8,slower=1.25,batch=1,wait=30")
    assert (found.slower, found.keeps_batch, found.wait_s) == (1.25, True, 30)


def test_uneven_tensor_parallelism_keeps_the_step_and_the_share_of_the_other_gpus(tmp_path):
    life = life_of([job(tmp_path, [WrittenAttempt(begin=0.0).ended(9.0)])])
    text = with_replayed_step(life, JOB, "smaller:replicas=8,tp=8")
    found = changed(JOB, text)
    assert (found.kept_share, found.slower) == (0.875, 1)
    assert changed(JOB, "smaller:replicas=8,slower=1").kept_share == 0
    with pytest.raises(UsageError, match="batch=1 needs slower="):
        with_replayed_step(life, JOB, "smaller:replicas=8,tp=8,batch=1")


def test_attempts_that_stood_long_hung_and_others_ended_by_themselves(tmp_path):
    attempts, begin = [], 0.0
    for stood in (8.0, 1.2, 6.0):
        attempts.append(WrittenAttempt(begin=begin))
        end = attempts[-1].trained(10) + stood
        attempts[-1].ended(end, code=1)
        begin = end + 2
    found = stages_of(life_of([job(tmp_path, attempts)]))
    assert found.detect_s == pytest.approx((7 + 5) / 2)  # beyond the step that the failure cut off
    assert found.crash_s == pytest.approx(0.2)
    assert found.hangs == pytest.approx(2 / 3)
    assert found.step_s == pytest.approx(1.0)


def test_process_that_is_killed_in_a_long_step_did_not_hang(tmp_path):
    # Two of 40 steps take 4 s: one moment in six is in such a step, so a failure finds it often.
    first = WrittenAttempt(begin=0)
    end = first.trained(40, longer={10: 3.0, 20: 3.0})
    first.ended(end + 3.5, code=1)
    second = WrittenAttempt(begin=end + 5)
    second.ended(second.trained(10))
    found = stages_of(life_of([job(tmp_path, [first, second])]))
    assert found.hangs == 0
    assert found.crash_s == pytest.approx(2.5)


def test_others_that_end_late_did_not_hang_where_one_process_was_gone_at_once(tmp_path):
    first = WrittenAttempt(begin=0)
    end = first.trained(40)
    first.ended(end + 0.5, code=1)
    first.workers[1]["ended_ns"] = ns(end + 7)
    second = WrittenAttempt(begin=end + 9)
    second.ended(second.trained(10))
    assert stages_of(life_of([job(tmp_path, [first, second])])).hangs == 0


def test_job_that_goes_on_with_fewer_ranks_has_the_stages_of_those_that_are_there(tmp_path):
    first = WrittenAttempt(begin=0)
    end = first.trained(20)
    first.checkpoint("save", 4 + 10.5, 0.25, "/c")
    first.ended(end, code=1)
    smaller = WrittenAttempt(begin=end + 3, ranks=1)
    later = smaller.trained(20)
    smaller.checkpoint("save", smaller.begin + 4 + 10.5, 0.25, "/c")
    smaller.ended(later, code=1)
    last = WrittenAttempt(begin=later + 3)
    last.ended(last.trained(20))
    found = stages_of(life_of([job(tmp_path, [first, smaller, last])]))
    assert found.step_s == pytest.approx(1.0, rel=0.02)
    assert found.start_s == pytest.approx(4.0, rel=0.02)
    assert found.down_s == pytest.approx(3.0)


def test_slow_steps_that_come_together_move_the_mean_of_many(tmp_path):
    together, apart = WrittenAttempt(begin=0), WrittenAttempt(begin=0)
    together.ended(together.trained(101, longer=dict.fromkeys(range(20, 30), 1.0)))
    apart.ended(apart.trained(101, longer=dict.fromkeys(range(5, 101, 10), 1.0)))
    noise = [
        stages_of(life_of([job(tmp_path / name, [each])])).step_noise
        for name, each in (("together", together), ("apart", apart))
    ]
    # One of ten means of ten steps is 2 s, the others 1 s: they deviate by 0.32 s of 1.1 s, times root 10.
    assert noise[0] == pytest.approx(10**0.5 * 0.1**0.5 / 1.1, rel=0.05)
    assert noise[1] < 0.1


def test_one_model_of_failures_explains_a_small_and_a_large_job():
    # Published of one cluster: 7.9 h at 1,024 GPUs, 1.8 h at 16,384; independent hosts give 28.8 h at 1,024.
    rate = PRESETS["rsc-1"]
    for gpus, mtbf_h in ((1024, 7.9), (16384, 1.8)):
        assert 1 / (rate.job + rate.host * gpus / 8) == pytest.approx(mtbf_h, rel=0.01)


def test_bloom_saved_less_often_than_young_says():
    # 40 s a checkpoint, steps of 105.2 s, a failure a week: 66 steps.
    recovery = Recovery(105.2, 100, 40.0, 0.0, 600.0, 0.0, 0.0, hosts=48)
    assert young_daly(recovery, PRESETS["bloom"].host * 48 / 3600) == 66


def test_rate_by_gpus_counts_those_of_a_host():
    assert rate_per_gpu(40_000, 8).host == pytest.approx(8 / 40_000)


def test_few_failures_of_its_own_are_no_rate():
    with pytest.raises(Unanswerable, match="2 failures in 10 h do not show"):
        own_rate(ObservedFailures(2, 36_000, 4))
    assert own_rate(ObservedFailures(5, 36_000, 4)).host == pytest.approx(5 / 10 / 4)


@pytest.mark.parametrize(
    ("text", "job_rate", "host_rate"),
    [
        ("time,host\n0,a\n3600,b\n7200,\n10800,c\n", 0.25, 0.75 / 4),
        (
            "time\n2024-05-01T00:00:00\n2024-05-01T01:00:00\n2024-05-01T02:00:00\n2024-05-01T03:00:00\n",
            1.0,
            0.0,
        ),
    ],
)
def test_log_of_failures_gives_a_rate(tmp_path, text, job_rate, host_rate):
    path = tmp_path / "log.csv"
    path.write_text(text)
    rate = rate_of_log(read_log(path), hosts=4)
    assert (rate.job, rate.host) == (pytest.approx(job_rate), pytest.approx(host_rate))


@pytest.mark.parametrize(
    "text", ["", "when\n1\n", "time , time\n1,2\n", "time\nsoon\n", "time\n\n", "time,host\n"]
)
def test_wrong_log_is_one_line_that_names_it(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"log\.csv"):
        read_log(path)


def test_uncertain_rate_gives_a_wider_interval():
    sure, unsure = (FailureRate(0.0, 0.01, count, "x") for count in (0, 3))
    (narrow,), (wide,) = (predict_goodput(JOB, rate, [], 200) for rate in (sure, unsure))
    assert wide.high - wide.low > narrow.high - narrow.low


def test_candidates_of_a_search_help_a_job_that_saves_too_often():
    rate = FailureRate(0.0, 0.001, 0, "x")
    often = changed(JOB, "checkpoint:every=20")
    base, *found = predict_goodput(often, rate, candidates(often, rate), 720)
    best = max(found, key=lambda each: each.gain_h)
    assert best.edits[0].startswith(("checkpoint:", "async:"))
    assert best.gain_low_h > 0
    assert best.throughput.low > 1
    assert best.throughput.low <= best.throughput.middle <= best.throughput.high
    assert best.throughput.middle == pytest.approx(best.goodput / base.goodput)
    assert (base.gain_h, base.throughput) == (None, None)


def written_job(folder):
    first = WrittenAttempt(begin=0)
    last = first.trained(30)
    for done in (10, 20, 30):
        first.checkpoint("save", 4 + done - 0.5 if done == 30 else 4 + done + 0.001, 0.25, "/c")
    second = WrittenAttempt(begin=last + 9)
    second.checkpoint("load", second.begin + 3.25, 0.5, "/c")
    second.ended(second.trained(10))
    return job(folder, [first.ended(last + 6, code=1), second])


def test_stages_are_those_of_the_attempts(tmp_path):
    found = stages_of(life_of([written_job(tmp_path)]))
    assert found.every == 10
    assert found.start_s == pytest.approx(4)
    assert found.down_s == pytest.approx(3)
    assert found.detect_s == pytest.approx(5)
    assert found.hosts == 1


def test_command_predicts_by_the_rate_that_is_given_and_refuses_several(tmp_path):
    path = written_job(tmp_path / "run").path
    done = dpro("goodput", path, "--mtbf-per-gpu", "10", "--edit", "spares:hosts=0", "--json")
    outlook = json.loads(done.stdout)["outlook"]
    assert outlook["host_failures_per_h"] == pytest.approx(0.2)
    assert [each["edits"] for each in outlook["predictions"]] == [[], ["spares:hosts=0"]]
    assert outlook["predictions"][1]["gain_h"] < 0
    assert "search" not in refused(dpro("goodput", path, "--preset", "bloom", "--mtbf-per-gpu", "9"), 2)
    assert "do not show" in refused(dpro("goodput", path, "--edit", "detect:s=1"), 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpoint:every=0", "every must be from 1 to 1,000,000,000, not 0"),
        ("checkpoint:every=2.5", "every must be a whole number, not '2.5'"),
        ("checkpoint:every=1e18", "every must be a whole number"),
        ("peers:every=0,stall=1", "from 1 to 1,000,000,000, not 0"),
        ("hosts:count=0", "from 1 to 1,000,000,000, not 0"),
        ("smaller:replicas=0,slower=1", "from 1 to 1,000,000,000, not 0"),
        ("spares:hosts=1" + "0" * 30, "from 0 to 1,000,000,000"),
        ("spares:hosts=1,repair=1e308", "from 0 to 1,000,000,000"),
        ("caches:left=3", "left must be from 0 to 1, not 3"),
        ("smaller:replicas=99,slower=1", "the job has 8 ranks, fewer than 99 replicas"),
        ("detect:s=nan", "s must be from 0 to 1,000,000,000, not nan"),
    ],
)
def test_values_that_no_job_can_have_are_refused(text, says):
    with pytest.raises(UsageError, match=says):
        changed(replace(JOB, ranks=8), text)


def test_checkpoints_of_a_job_that_saved_none_need_what_they_cost():
    unsaved = replace(JOB, every=0, stall_s=0)
    with pytest.raises(UsageError, match="the job saved none"):
        changed(unsaved, "checkpoint:every=200")
    found = changed(unsaved, "checkpoint:every=200,stall=5")
    assert (found.every, found.stall_s) == (200, 5)
    assert changed(JOB, "checkpoint:every=20").stall_s == JOB.stall_s


def test_interval_for_a_job_that_hardly_fails_is_one_that_may_be_given():
    changed(JOB, f"checkpoint:every={2 * young_daly(JOB, 1e-30)}")


def test_more_failures_than_can_be_simulated_are_refused():
    for rate, hours in ((1e12, 720), (float("inf"), 1), (1, float("nan")), (1, 1e9)):
        with pytest.raises(Unanswerable, match="more than the 10,000 that are simulated"):
            predict_goodput(JOB, FailureRate(rate, 0.0, 0, "x"), [], hours)
    with pytest.raises(Unanswerable, match="more than"):
        predict_goodput(JOB, FailureRate(0.0, 1e-3, 0, "x"), [["hosts:count=100000"]], 720)


DAYS = [f"2024-05-0{day}" for day in range(1, 6)]


@pytest.mark.parametrize(
    "text",
    [
        "time,host\n" + "".join(f"{day},a\n" for day in DAYS),
        "time, host\n" + "".join(f"{day}T01:00:00+02:00, a\n" for day in DAYS),
        "time,host\n" + "".join(f"{day} 01:00:00,a\n" for day in DAYS),
    ],
)
def test_log_may_write_days_zones_and_blanks(tmp_path, text):
    path = tmp_path / "log.csv"
    path.write_text(text)
    found = rate_of_log(read_log(path), hosts=1)
    assert (found.job, found.host) == (0, pytest.approx(1 / 24))


@pytest.mark.parametrize("time", ["NaN", "inf", "1700000000000", "-1e300"])
def test_time_that_is_none_is_refused(tmp_path, time):
    path = tmp_path / "log.csv"
    path.write_text(f"time,host\n1,a\n2,b\n3,c\n{time},d\n")
    with pytest.raises(InputError, match=r"log\.csv: .* s is not a time: times are ISO 8601"):
        read_log(path)


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_pipe_that_no_process_writes_to_is_no_log(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=rf"{name}: not readable as a log of failures"):
        read_log(tmp_path / name)


def test_days_of_which_the_order_is_not_known_are_refused(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("host,time\n" + "".join(f"a,0{day}/01/2024 10:00\n" for day in range(1, 6)))
    with pytest.raises(InputError, match=r"it is unclear whether .* has the day first"):
        read_log(path)


@pytest.mark.parametrize("hosts", [[["a"]] * 4, [b"\xff\xfe"] * 4])
def test_hosts_that_are_no_names_are_refused(tmp_path, hosts):
    path = tmp_path / "log.parquet"
    pl.DataFrame({"time": [1, 2, 3, 4], "host": hosts}).write_parquet(path)
    with pytest.raises(InputError, match="its hosts are not names"):
        read_log(path)


def test_search_by_the_failures_of_the_job_itself(tmp_path):
    attempts, begin = [], 0.0
    for _ in range(4):
        attempts.append(WrittenAttempt(begin=begin))
        begin = attempts[-1].trained(5) + 2
        attempts[-1].ended(begin, code=1)
    outlook = json.loads(dpro("goodput", job(tmp_path, attempts).path, "--hours", "3", "--json").stdout)[
        "outlook"
    ]
    assert (outlook["hours"], outlook["rate"]) == (3, "4 failures of the job's own")


@pytest.mark.parametrize("option", ["--hours", "--mtbf-per-gpu"])
def test_command_refuses_numbers_that_are_not_finite(tmp_path, option):
    path = written_job(tmp_path).path
    line = refused(dpro("goodput", path, "--preset", "bloom", option, "nan"), 2)
    assert f"'{option}': nan is not a number" in line


def test_run_without_workers_is_one_host(tmp_path):
    attempt = WrittenAttempt(begin=0)
    attempt.trained(5)
    path = attempt.written(tmp_path).path
    outlook = json.loads(dpro("goodput", path, "--mtbf-per-gpu", "100", "--json").stdout)["outlook"]
    assert (outlook["hosts"], outlook["host_failures_per_h"]) == (1, pytest.approx(2 / 100))
