"""What `dpro info` says of telemetry, from made-up counters."""

import polars as pl

from dpro.analysis.answers.info import GpuDocument, summarize, telemetry_in_words
from dpro.documents import plain
from dpro.schema import COUNTERS, WORKERS, conform

GPU = "8c5bf1a2"


def counters(*rows: tuple[str, str, float, float], rank: int = -1) -> pl.DataFrame:
    """Rows of `(device, counter, time in s, value)`."""
    frame = pl.DataFrame(rows, schema=["device", "counter", "time_s", "value"], orient="row")
    return conform(
        COUNTERS,
        frame.select("device", "counter", time_ns=pl.col("time_s") * 1e9, value="value").with_columns(
            host=pl.lit("node1"), rank=pl.lit(rank)
        ),
    )


def workers(*uuids: str) -> pl.DataFrame:
    return conform(
        WORKERS, pl.DataFrame({"rank": range(len(uuids)), "host": "node1", "gpu_uuid": list(uuids)})
    )


def of_gpu(*rows: tuple[str, float, float]) -> GpuDocument:
    beats = [(GPU, "sampling_us", time, 100 + time) for time in (0.0, 10.0)]
    frame = counters(*beats, *[(GPU, *row) for row in rows])
    (gpu,) = summarize([frame], workers("GPU-other", f"GPU-{GPU}")).gpus
    return gpu


def test_what_was_sampled_is_counted_over_all_parts():
    node = [
        counters(("", "telemetry_cpu_s", time, time), ("eth0", "rx_bytes", time, 1)) for time in (1, 2, 3)
    ]
    ranks = [counters(("", "memory_bytes", 1, 7), rank=rank) for rank in (1, 0)]
    steps = counters(("", "step_gc_s", 1, 7), rank=9)
    summary = summarize([*node, *ranks, steps], workers("", ""))
    assert plain(summary) == {
        "hosts": ["node1"],
        "samples": 3,
        "ports": [{"host": "node1", "device": "eth0"}],
        "ranks": [0, 1],
        "gpus": [],
        "memory_peaks": [],
    }
    assert telemetry_in_words(summary) == ["3 samples of 1 host, 1 network port, 2 ranks"]


def test_a_run_without_telemetry_says_nothing():
    assert telemetry_in_words(summarize([], workers())) == []


def test_a_reason_holds_clocks_down_until_the_next_row_or_the_end():
    gpu = of_gpu(
        ("clocks_sw_power_cap", 0, 0),
        ("clocks_sw_power_cap", 2, 1),
        ("clocks_sw_power_cap", 5, 0),
        ("clocks_sw_power_cap", 9, 1),
        ("clocks_hw_slowdown", 0, 0),
        ("clocks_gpu_idle", 0, 1),
    )
    assert gpu.clocks_held_s == {"sw_power_cap": 4}


def test_errors_are_those_that_came_while_it_was_watched():
    gpu = of_gpu(
        ("ecc_corrected", 0, 100),
        ("ecc_corrected", 1, 103),
        ("ecc_corrected", 2, 1),  # the driver was loaded again
        ("ecc_uncorrected", 0, 5),
        ("pcie_replays", 0, 1),
        ("pcie_replays", 1, 2),
    )
    assert gpu.errors == {"ecc_corrected": 4, "pcie_replays": 1}


def test_a_gpu_in_trouble_is_a_line_with_its_ranks():
    summary = summarize(
        [
            counters(
                ("", "telemetry_cpu_s", 1, 1),
                (GPU, "sampling_us", 0, 1),
                (GPU, "sampling_us", 8, 2),
                (GPU, "xid", 3, 31),
                (GPU, "xid", 4, 31),
                (GPU, "xid", 5, 79),
                (GPU, "lost", 6, 1),
                (GPU, "remapped_rows_pending", 0, 1),
                (GPU, "clocks_hw_thermal_slowdown", 2, 1),
                ("quiet", "sampling_us", 1, 1),
            )
        ],
        workers("quiet", GPU, GPU),
    )
    assert telemetry_in_words(summary) == [
        "1 sample of 1 host, 2 GPUs",
        f"GPU {GPU} on node1 (rank 1, 2): lost; XID 31 2 times; XID 79; rows to be remapped at the next "
        "reset; clocks held down by hw thermal slowdown for 6.0 s",
    ]


def test_ranks_of_an_instance_are_those_that_have_its_uuid():
    frame = counters((f"{GPU}/p1", "sampling_us", 0, 1))
    (gpu,) = summarize([frame], workers("other", "p1")).gpus
    assert gpu.ranks == [1]


def test_gpus_of_other_jobs_are_counted_apart_and_named_as_such():
    rows = [(f"g{number}", "sampling_us", 1, 100.0) for number in range(8)]
    rows += [("g1", "xid", 1, 94.0), ("g7", "xid", 1, 79.0), ("", "telemetry_cpu_s", 1, 1.0)]
    summary = summarize([counters(*rows)], workers("GPU-g3", "GPU-g2", "GPU-g1", "GPU-g0"))
    assert [gpu.ranks for gpu in summary.gpus] == [[3], [2], [1], [0], [], [], [], []]
    assert telemetry_in_words(summary) == [
        "1 sample of 1 host, 8 GPUs",
        "4 of the GPUs are of no rank of this job",
        "GPU g1 on node1 (rank 2): XID 94",
        "GPU g7 on node1 (no rank of this job): XID 79",
    ]


def test_gpus_that_are_known_by_their_order_only_are_said_to_be():
    rows = [("a", "sampling_us", 1, 9.0), ("a", "pci_address", 1, 5.0), ("", "telemetry_cpu_s", 1, 1.0)]
    ranks = workers("").with_columns(local_rank=pl.lit(0, pl.Int32), gpu_name=pl.lit("H100"))
    assert telemetry_in_words(summarize([counters(*rows)], ranks))[1].startswith(
        "which rank has which GPU is known by"
    )


def test_peaks_of_memory_are_those_of_all_parts_and_are_reported_without_telemetry_too():
    def part(rank: int, *values: float) -> pl.DataFrame:
        rows = [("gpu 0", "memory_allocated_bytes", time, value) for time, value in enumerate(values)]
        return counters(*rows, rank=rank)

    summary = summarize([part(0, 1024, 3072), part(0, 2048), part(1, 512)], workers())
    assert plain(summary)["memory_peaks"] == [
        {"rank": 0, "device": "gpu 0", "peak_bytes": 3072},
        {"rank": 1, "device": "gpu 0", "peak_bytes": 512},
    ]
    (line,) = telemetry_in_words(summary)
    assert line.endswith("at most 3.1 kB (rank 0), at least 512 B (rank 1)")
