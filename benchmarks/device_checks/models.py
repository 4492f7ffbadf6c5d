"""Checks of whole models and of small jobs on another device.

A model on one device, and the shares of its time that products and all else take there, say its time on
another: by two numbers per device, sustained arithmetic and bandwidth, from the data sheets or learned from
other models. Small jobs wait for their hosts, so no sheet says them: trees on what a job is, learned from
other jobs that ran on both machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks.device_checks.figures import compared, covered
from dpro.replay.models.gpus import GPUS

MODEL = ["model", "mode", "seq_len", "batch"]
# Parts of names of modules; what is cut off at the end is so in the source.
LINEAR = r"matmul|bmm|addmm|dense|decoder$|key|quer|valu|_proj|fc\d|lm_head|output\.de|out_pro|classifier"
NOT_LINEAR = r"drop|[Nn]orm|activ|embed|layer_n"
ONCE = r"lm_head|decoder$|wte|wpe|embed|pooler|cls|ln_f|final_layer_norm$|classifier|arange"
# Shares of their sheets' fp32 peaks that boards sustain: those of at most 75 W lack the power, and CDNA is
# between its vector and its matrix peak. Set with these very tables in sight.
SUSTAINED = {
    "Tesla_T4": 0.6,
    "Tesla_P4": 0.6,
    "NVIDIA_L4": 0.6,
    "AMD_Instinct_MI100": 0.7,
    "AMD_Instinct_MI210": 0.7,
}
MATRIX_TFLOPS = {"AMD_Instinct_MI100": 46.1, "AMD_Instinct_MI210": GPUS["MI210"].tflops["fp32"]}
TRUSTED = 1.0  # standard deviation, in log, of a sheet's number, against pairs missed by 10%
MIN_JOBS = 8  # to learn a pair of machines from
LAUNCH_BOUND = 0.1  # of its peak: a job below that waits for its host
CHANGED = 0.05  # a difference that is more than noise
CHAIN = (("A100", "H100"), ("H100", "GB200"))
SOURCES = {"A100": "A100-SXM4-80GB", "H100": "H100", "GB200": "GB200"}


def whole_models(train: Path, data: Path) -> dict[str, Any]:
    """NeuSight's models on every other device of the same folder; learned from other models of `train`."""
    if not all((folder / "neusight_models.csv").is_file() for folder in (train, data)):
        return {}
    tried, known = _pairs(data), _pairs(train)
    names = sorted({*tried["device"], *tried["device_to"], *known["device"], *known["device_to"]})
    sheet = _sheets(names, train, data)
    predicted = np.zeros((2, tried.height))
    for model in tried["model"].unique():
        mine = (tried["model"] == model).to_numpy()
        others = known.filter(pl.col("model") != model)
        numbers = _learned(others, names, sheet) if others.height else sheet
        for turn, each in enumerate((sheet, numbers)):
            predicted[turn, mine] = (
                np.exp(_logs(each, tried.filter(mine), names)) * tried.filter(mine)["e2e_ms"].to_numpy()
            )
    real = tried["e2e_ms_to"].to_numpy()
    note = "learned from other models on both devices"
    return {
        "whole models, other models measured there": compared(predicted[1], real, (7, 25), note),
        "whole models, from the sheet": compared(
            predicted[0], real, (15, None), "sustained shares: device_checks/models.py"
        ),
    }


def _plain(folder: Path) -> pl.DataFrame:
    models = pl.read_csv(folder / "neusight_models.csv").filter(pl.col("option").fill_null("") == "")
    return models.with_columns(pl.col("device").str.replace_all("[ -]", "_"))


def _pairs(folder: Path) -> pl.DataFrame:
    """Each model on each two devices, with the share of its time on the first that products take."""
    models = _plain(folder)
    operators = pl.read_parquet(folder / "neusight_model_ops.parquet").filter(
        pl.col("option").fill_null("") == ""
    )
    target = pl.col("target").str.replace(r" at 0x[0-9a-f]+", "")
    linear = target.str.contains(LINEAR) & ~target.str.contains(NOT_LINEAR)
    weighed = (
        operators.with_columns(pl.col("device").str.replace_all("[ -]", "_"), target=target, linear=linear)
        .join(models.select("device", *MODEL, "layers"), on=["device", *MODEL])
        .with_columns(
            ms=pl.col("latency_ms")
            * pl.col("count")
            * pl.when(target.str.contains(ONCE)).then(1).otherwise("layers")
        )
    )
    shares = weighed.group_by("device", *MODEL).agg(
        share=pl.col("ms").filter("linear").sum() / pl.col("ms").sum()
    )
    both = models.join(models.select("device", *MODEL, "e2e_ms"), on=MODEL, suffix="_to")
    found = both.filter(pl.col("device") != pl.col("device_to")).join(shares, on=["device", *MODEL])
    return found.select(*MODEL, "device", "device_to", "e2e_ms", "e2e_ms_to", "share").sort(pl.all())


def _sheets(names: list[str], *folders: Path) -> np.ndarray:
    """[2, D] logarithms of sustained TFLOP/s and of GB/s."""
    frames = [
        pl.read_csv(path) for folder in folders if (path := folder / "neusight_device_specs.csv").is_file()
    ]
    rows = {
        row["device"].replace(" ", "_").replace("-", "_"): row
        for row in pl.concat(frames).iter_rows(named=True)
    }
    tflops = [MATRIX_TFLOPS.get(name) or rows[name]["fp32_gflops"] / 1e3 for name in names]
    sustained = [SUSTAINED.get(name, 1.0) for name in names]
    return np.log([np.multiply(tflops, sustained), [rows[name]["mem_bw_gb_s"] for name in names]])


def _logs(numbers: np.ndarray, pairs: pl.DataFrame, names: list[str]) -> np.ndarray:
    """[N] log of the time on the second device over that on the first."""
    here, there = (np.searchsorted(names, pairs[column].to_numpy()) for column in ("device", "device_to"))
    share = pairs["share"].to_numpy()
    compute, memory = np.exp(numbers[:, here] - numbers[:, there])
    return np.log(share * compute + (1 - share) * memory)


def _learned(pairs: pl.DataFrame, names: list[str], sheet: np.ndarray) -> np.ndarray:
    from scipy.optimize import least_squares

    real = np.log(pairs["e2e_ms_to"].to_numpy() / pairs["e2e_ms"].to_numpy())

    def missed(flat: np.ndarray) -> np.ndarray:
        numbers = flat.reshape(sheet.shape)
        return np.concatenate([_logs(numbers, pairs, names) - real, (flat - sheet.ravel()) / TRUSTED])

    return least_squares(missed, sheet.ravel(), loss="soft_l1", f_scale=0.1).x.reshape(sheet.shape)


def small_jobs(train: Path, data: Path) -> dict[str, Any]:
    """Megatron's regression jobs from one machine to the next; learned from other jobs of `train`."""
    if not all((folder / "megatron_golden.csv").is_file() for folder in (train, data)):
        return {}
    parts = [np.ones((6, 0))]
    for device, to in CHAIN:
        known, tried = (_both(folder, device, to) for folder in (train, data))
        if known.height < MIN_JOBS or not tried.height:
            continue
        mine = {row["job"][0]: _ratio(known, row) for row in tried.iter_slices(1)}
        others = {
            row["job"][0]: mine.get(row["job"][0]) or _ratio(known, row) for row in known.iter_slices(1)
        }
        missed = np.log((known["step_ms_to"] / known["step_ms"]).to_numpy() / list(others.values()))
        least, most = np.exp(np.quantile(missed, (0.1, 0.9)))
        first, predicted = tried["step_ms"].to_numpy(), tried["step_ms"].to_numpy() * list(mine.values())
        waits = _flop_share(tried, SOURCES[device]) < LAUNCH_BOUND
        parts.append(
            np.array(
                [first, predicted, predicted * least, predicted * most, tried["step_ms_to"].to_numpy(), waits]
            )
        )
    return _figures(*np.concatenate(parts, 1))


def _figures(first, predicted, least, most, measured, waits) -> dict[str, Any]:
    clear = np.abs(measured / first - 1) > CHANGED
    right = 100 * float(np.mean(((predicted < first) == (measured < first))[clear])) if clear.any() else None
    nothing = {"median_pct": None, "p90_pct": None}
    bound = 100 * float(waits.mean()) if waits.size else 0.0
    note = "learned from other jobs on both machines"
    return {
        "small jobs, A100 -> H100 -> GB200": compared(predicted, measured, (15, 50), note),
        "small jobs, which machine is faster": {
            **{"n": int(clear.sum()), **nothing, "right_pct": right and round(right, 1)},
            **{"bar": "90% right", "holds": right and right >= 90},
            "note": f"where the steps differ by more than {CHANGED:.0%}",
        },
        "small jobs, interval": covered(least, most, measured),
        "small jobs, recognised as launch-bound": {
            **{
                "n": int(measured.size),
                **nothing,
                "right_pct": round(bound, 1),
                "bar": "reported",
                "holds": None,
            },
            "note": f"share whose operations take less than {LAUNCH_BOUND:.0%} of the peak",
        },
    }


def traced_model(traces: Path) -> dict[str, Any]:
    """BERT traced on an H100 and on an MI300X: its step there by the edit `device`."""
    from dpro.cli.runs import open_quietly
    from dpro.replay.construction.graph_builder import build_graph
    from dpro.replay.timeline import replay, step_times
    from dpro.replay.whatif.registry import parse_edit

    files = [traces / "single" / f"{name}_bert_pystack.json.gz" for name in ("h100", "mi300x")]
    if not all(file.is_file() for file in files):
        return {}
    graph, other = (build_graph(open_quietly(file)).predictive for file in files)
    steps = []
    for each in (parse_edit("device:to=MI300X").apply(graph), other):
        timeline = replay(each)
        steps.append(step_times(each, timeline.start, timeline.end)["duration_ns"].median())
    note = "a job that waits for its host: says little of the GPUs"
    return {"step of one model, H100 -> MI300X": compared(steps[:1], steps[1:], (15, None), note)}


def _both(folder: Path, device: str, to: str) -> pl.DataFrame:
    jobs = pl.read_csv(folder / "megatron_golden.csv").filter(pl.col("platform").str.starts_with("dev_dgx_"))
    there = jobs.filter(device=to).select("job", step_ms_to="step_ms")
    return jobs.filter(pl.col("device") == device).join(there, on="job").unique("job").sort("job")


def _ratio(known: pl.DataFrame, row: pl.DataFrame) -> float:
    """The ratio of a job's steps on both machines, from all jobs but itself."""
    from sklearn.ensemble import ExtraTreesRegressor

    others = known.filter(pl.col("job") != row["job"][0])
    log = np.log(others["step_ms_to"].to_numpy() / others["step_ms"].to_numpy())
    trees = ExtraTreesRegressor(200, min_samples_leaf=2, random_state=0).fit(_features(others), log)
    return float(np.exp(trees.predict(_features(row))[0]))


SIZES = (
    "tp",
    "pp",
    "cp",
    "ep",
    "vpp",
    "micro_batch",
    "global_batch",
    "seq_len",
    "layers",
    "hidden",
    "experts",
)
FLAGS = (
    *("dist_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    *("sequence_parallel", "deterministic", "bf16"),
)
FAMILIES = ("gpt", "moe", "bert", "t5", "mamba", "multimodal", "hybrid")


def _features(jobs: pl.DataFrame) -> np.ndarray:
    columns = [np.log2(jobs[name].fill_null(1).cast(pl.Float64).clip(1).to_numpy()) for name in SIZES]
    columns += [jobs[name].cast(pl.Float64).fill_null(0).to_numpy() for name in FLAGS]
    columns += [
        jobs[name].is_not_null().cast(pl.Float64).to_numpy() for name in ("fp8", "recompute", "nccl_algo")
    ]
    step = jobs["step_ms"].to_numpy()
    columns += [np.log(step), np.log(_flops(jobs) / step)]
    for name in ("step_ms_p90", "first_step_ms"):
        columns.append(np.log((jobs[name] / jobs["step_ms"]).fill_null(1).to_numpy()))
    family = jobs["job"].str.split("/").list.first()
    columns += [family.str.contains(name).cast(pl.Float64).to_numpy() for name in FAMILIES]
    return np.stack(columns, 1)


def _flops(jobs: pl.DataFrame) -> np.ndarray:
    """[N] operations of a step: 72 layers tokens hidden² (Narayanan et al., SC21, without attention)."""
    layers, hidden, length, batch = (
        jobs[name].fill_null(usual).cast(pl.Float64).to_numpy()
        for name, usual in (("layers", 12), ("hidden", 512), ("seq_len", 1024), ("global_batch", 32))
    )
    return 72 * layers * length * batch * hidden**2


def _flop_share(jobs: pl.DataFrame, device: str) -> np.ndarray:
    gpus = jobs["gpus_from_recipe"].fill_null(8).to_numpy()
    return _flops(jobs) / gpus / (jobs["step_ms"].to_numpy() * GPUS[device].tflops["bf16"] * 1e9)
