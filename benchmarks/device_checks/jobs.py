"""Checks of small jobs on another machine: Megatron-LM's regression tests, which wait for their hosts.

Two predictions are averaged in log. The first counts the host's work: some per layer and micro-batch, more
with tensor, context or expert parallelism, plus the pipeline's bubble; arithmetic at a share of the sheet's
peak is added smoothly. Its few numbers are fitted to all jobs of a machine; of a job's residual on the first
machine, a learned share is carried over to the second. The other prediction is trees on these counts and on
the job's residual on the first machine.

For a pair of machines with too few known jobs, only the data sheets are used: arithmetic scales with the
peaks, and the rest of the step, the host's, stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from benchmarks.device_checks.figures import compared, covered, nothing
from dpro.replay.cost import HOLDS
from dpro.replay.cost.kernels.roofline import GPUS

MIN_JOBS = 8  # known on both machines, to learn a pair of machines from
LAUNCH_BOUND = 0.1  # share of the peak below which a job waits for its host
CHANGED = 0.05  # relative difference that is more than noise
CHAIN = (("A100", "H100"), ("H100", "GB200"))
SOURCES = {"A100": "A100-SXM4-80GB", "H100": "H100", "GB200": "GB200"}
FILE = "megatron_golden.csv"
# Jobs on another number of GPUs and whole recipes, whose hosts do other work.
OTHER_WORK = "1node|release|grpo"
# Priors: ms per layer and micro-batch, the additions of parallelism, and last the share of the peak.
ASSUMED = np.log([1.0, 1.0, 0.5, 0.3, 1.0, 0.5, 1.0, 0.35])
FIXED_LAYERS = 20.0  # data, optimizer and logging of a step, in layers
WEIGHT = 0.3  # of a prior, in the fit
SPREAD = 0.2  # of residuals, in log
UNKNOWN_HOST = 0.7  # log of the factor (about two) by which an unknown host may be faster or slower
TREES: dict[str, Any] = {"n_estimators": 300, "min_samples_leaf": 3, "random_state": 0}


class _Tried(NamedTuple):
    """[N] jobs: ms on the first machine; ms on the second predicted, with interval, and measured; who waits.

    `waits` marks jobs that wait for their hosts; `learned` says whether other jobs were known on both.
    """

    first: np.ndarray
    predicted: np.ndarray
    least: np.ndarray
    most: np.ndarray
    measured: np.ndarray
    waits: np.ndarray
    learned: bool


def small_jobs(train: Path, data: Path) -> dict[str, Any]:
    """Predict each job of `data` from one machine to the next; learned from other configurations of `train`.

    Args:
        train: folder of the jobs that may be learned from.
        data: folder of the jobs that are tried.
    """
    if not all((folder / FILE).is_file() for folder in (train, data)):
        return _figures([], f"no {FILE} in both folders")
    known, tried = (_jobs(folder) for folder in (train, data))
    same = train.resolve() == data.resolve()
    pairs = {pair: _pair(known, tried, *pair, same) for pair in CHAIN}
    parts = {" -> ".join(pair): part for pair, part in pairs.items() if part is not None}
    note = "learned from jobs of other configurations" if parts else "no job on two machines of the chain"
    if sheets := [name for name, part in parts.items() if not part.learned]:
        note += f"; {', '.join(sheets)} from the sheets, for lack of jobs on both"
    return _figures(list(parts.values()), note)


def _jobs(folder: Path) -> pl.DataFrame:
    types = {"experts": pl.String, "etp": pl.String}
    jobs = pl.read_csv(folder / FILE, schema_overrides=types, infer_schema_length=None)
    return jobs.filter(
        pl.col("platform").cast(pl.String).str.starts_with("dev_dgx_"), pl.col("step_ms").is_not_null()
    )


def _pair(known: pl.DataFrame, tried: pl.DataFrame, device: str, to: str, same: bool) -> _Tried | None:
    """Predict jobs from one machine to the next; None where there are none."""
    pairs, wanted = (
        _both(known, known, device, to),
        _both(pl.concat([known, tried], how="diagonal_relaxed"), tried, device, to),
    )
    logs, jobs = [], []
    for left_out, mine in _parts(wanted, same):
        rest, others = (frame.filter(~left_out) for frame in (pairs, known))
        if rest.height >= MIN_JOBS:
            logs.append(_log_ratio(others, rest, mine, device, to))
            jobs.append(mine)
    if not jobs:
        return None if wanted.is_empty() else _from_sheets(wanted, device, to)
    frame, ratios = pl.concat(jobs), np.exp(np.concatenate(logs))
    first, measured = frame["step_ms"].to_numpy(), frame["step_ms_to"].to_numpy()
    missed = np.log(measured / first / ratios) if same else _missed(known, pairs, device, to)
    least, most = np.exp(np.quantile(missed, ((1 - HOLDS) / 2, (1 + HOLDS) / 2)))
    predicted = first * ratios
    waits = _flop_share(frame, SOURCES[device]) < LAUNCH_BOUND
    return _Tried(first, predicted, predicted * least, predicted * most, measured, waits, True)


def _from_sheets(jobs: pl.DataFrame, device: str, to: str) -> _Tried:
    """Predict with few known jobs; the interval spans the ratio of the peaks to a host of half the speed."""
    first, measured = (jobs[name].to_numpy() for name in ("step_ms", "step_ms_to"))
    here, there = (GPUS[SOURCES[name]].tflops["bf16"] for name in (device, to))
    share = np.minimum(_flop_share(jobs, SOURCES[device]), 1)
    predicted = first * (share * here / there + 1 - share)
    least = np.minimum(first * here / there, predicted * np.exp(-UNKNOWN_HOST))
    return _Tried(
        *(first, predicted, least, predicted * np.exp(UNKNOWN_HOST)), measured, share < LAUNCH_BOUND, False
    )


def _both(first: pl.DataFrame, second: pl.DataFrame, device: str, to: str) -> pl.DataFrame:
    there = second.filter(pl.col("device") == to).select("job", step_ms_to="step_ms").unique("job")
    return first.filter(pl.col("device") == device).unique("job").join(there, on="job").sort("job")


def _parts(jobs: pl.DataFrame, same: bool) -> Iterator[tuple[pl.Expr, pl.DataFrame]]:
    """Yield jobs to predict, and which not to learn from: their configuration, or the jobs themselves."""
    if jobs.is_empty():
        return
    if not same:
        yield pl.col("job").is_in(jobs["job"].to_list()), jobs
        return
    for (configuration,), mine in jobs.group_by("configuration", maintain_order=True):
        yield pl.col("configuration") == configuration, mine


def _missed(known: pl.DataFrame, pairs: pl.DataFrame, device: str, to: str) -> np.ndarray:
    """Return [N] log of measured over predicted of known jobs, each predicted from other configurations."""
    missed = [np.zeros(0)]
    for left_out, mine in _parts(pairs, True):
        rest, others = (frame.filter(~left_out) for frame in (pairs, known))
        if rest.height >= MIN_JOBS:
            real = np.log((mine["step_ms_to"] / mine["step_ms"]).to_numpy())
            missed.append(real - _log_ratio(others, rest, mine, device, to))
    found = np.concatenate(missed)
    return found if found.size else np.array([-0.7, 0.7])


def _log_ratio(
    known: pl.DataFrame, pairs: pl.DataFrame, jobs: pl.DataFrame, device: str, to: str
) -> np.ndarray:
    """Predict [N] log of the step on the second machine over that on the first.

    Args:
        known: jobs on either machine.
        pairs: jobs on both.
        jobs: whose steps on the first are known.
        device, to: the machines.
    """
    from scipy.optimize import least_squares
    from sklearn.ensemble import ExtraTreesRegressor

    usual = {name: _usual(known, name) for name in (device, to)}
    here, there = ((usual[name](pairs), usual[name](jobs)) for name in (device, to))
    took, takes = (np.log(frame["step_ms"].to_numpy()) for frame in (pairs, jobs))
    real = np.log(pairs["step_ms_to"].to_numpy())

    def residuals(line: np.ndarray) -> np.ndarray:
        return np.append(real - there[0] - line[0] - line[1] * (took - here[0]), line[1] - 0.5)

    offset, share = least_squares(residuals, [0.0, 0.5], loss="soft_l1", f_scale=SPREAD).x
    by_counts = there[1] + offset + share * (takes - here[1]) - takes
    trees = ExtraTreesRegressor(**TREES).fit(_features(pairs, here[0]), real - took)
    return (by_counts + trees.predict(_features(jobs, here[1]))) / 2


def _usual(known: pl.DataFrame, device: str):
    """Fit a function from jobs to the log of the ms that such jobs usually take on a machine."""
    from scipy.optimize import least_squares

    mine = known.filter(pl.col("device") == device, ~pl.col("job").str.contains(OTHER_WORK))
    peak = GPUS[SOURCES[device]].tflops["bf16"] * 1e9
    work, flops, took = _host_work(mine), _flops(mine), np.log(mine["step_ms"].to_numpy())

    def log_ms(numbers: np.ndarray, work: np.ndarray, flops: np.ndarray) -> np.ndarray:
        return np.logaddexp(np.log(work @ np.exp(numbers[:-1])), np.log(flops / peak) - numbers[-1])

    found = least_squares(
        lambda numbers: np.append(log_ms(numbers, work, flops) - took, WEIGHT * (numbers - ASSUMED)),
        ASSUMED,
        loss="soft_l1",
        f_scale=SPREAD,
    ).x
    return lambda jobs: log_ms(found, _host_work(jobs), _flops(jobs))


def _column(jobs: pl.DataFrame, name: str, usual: float) -> np.ndarray:
    return jobs[name].cast(pl.Float64, strict=False).fill_null(usual).to_numpy()


def _micro_batches(jobs: pl.DataFrame) -> np.ndarray:
    tp, pp, cp = (_column(jobs, name, 1) for name in ("tp", "pp", "cp"))
    replicas = np.maximum(_column(jobs, "gpus_from_recipe", 8) / (tp * pp * cp), 1)
    return np.maximum(_column(jobs, "global_batch", 32) / replicas / _column(jobs, "micro_batch", 4), 1)


def _layers(jobs: pl.DataFrame) -> np.ndarray:
    """Return [N] layers a rank runs in a step: its stage per micro-batch, a third more with recomputation."""
    again = (jobs["recompute"].cast(pl.String).fill_null("") == "full").to_numpy() / 3
    return _micro_batches(jobs) * _column(jobs, "layers", 12) / _column(jobs, "pp", 1) * (1 + again)


def _host_work(jobs: pl.DataFrame) -> np.ndarray:
    """Return [N, 7] the host's work in a step, in layers: fixed, total, and per kind of parallelism."""
    pp, micro = _column(jobs, "pp", 1), _micro_batches(jobs)
    layers = _layers(jobs) * (1 + (pp - 1) / micro)  # with the bubble
    t5 = (jobs["job"].str.split("/").list.first() == "t5").to_numpy()  # an encoder and a decoder
    parallel = (
        *(_column(jobs, "tp", 1) > 1, _column(jobs, "cp", 1) - 1),
        *(_column(jobs, "experts", 0) > 0, t5),
    )
    fixed = np.full(jobs.height, FIXED_LAYERS)
    return np.stack([fixed, layers, *(layers * each for each in parallel), micro * (pp > 1)], 1)


def _features(jobs: pl.DataFrame, usual: np.ndarray) -> np.ndarray:
    took = np.log(jobs["step_ms"].to_numpy())
    columns = [took - usual, np.log(_layers(jobs)), np.log(_flops(jobs)) - took]
    columns += [_column(jobs, name, 1) > 1 for name in ("tp", "pp", "cp")]
    columns.append(_column(jobs, "deterministic", 0))
    columns.append(np.log((jobs["step_ms_p90"] / jobs["step_ms"]).fill_null(1).to_numpy()))
    return np.stack(columns, 1)


def _flops(jobs: pl.DataFrame) -> np.ndarray:
    """Return [N] FLOP per GPU: 72 layers tokens hidden² (Narayanan et al., SC21, without attention)."""
    layers, hidden, length, batch, gpus = (
        _column(jobs, name, usual)
        for name, usual in (
            *(("layers", 12), ("hidden", 512), ("seq_len", 1024)),
            *(("global_batch", 32), ("gpus_from_recipe", 8)),
        )
    )
    return 72 * layers * length * batch * hidden**2 / gpus


def _flop_share(jobs: pl.DataFrame, device: str) -> np.ndarray:
    return _flops(jobs) / (jobs["step_ms"].to_numpy() * GPUS[device].tflops["bf16"] * 1e9)


def _figures(parts: list[_Tried], note: str) -> dict[str, Any]:
    columns = [np.concatenate(each) for each in zip(*(part[:-1] for part in parts))] or [np.zeros(0)] * 6
    tried = _Tried(*columns, learned=bool(parts))
    clear = np.abs(tried.measured / tried.first - 1) > CHANGED
    right = (tried.predicted < tried.first) == (tried.measured < tried.first)
    return {
        "small jobs, A100 -> H100 -> GB200": compared(tried.predicted, tried.measured, (15, 50), note),
        "small jobs, which machine is faster": _share(
            right[clear], "90% right", 90, f"where the steps differ by more than {CHANGED:.0%}", note
        ),
        "small jobs, interval": covered(tried.least, tried.most, tried.measured, reason=note),
        "small jobs, recognised as launch-bound": _share(
            tried.waits > 0,
            "reported",
            None,
            f"share whose operations take less than {LAUNCH_BOUND:.0%} of the peak",
            note,
        ),
    }


def _share(right: np.ndarray, bar: str, least: float | None, note: str, reason: str) -> dict[str, Any]:
    if not right.size:
        return nothing(bar, reason) | {"right_pct": None}
    share = 100 * float(right.mean())
    figures = {"n": int(right.size), "median_pct": None, "p90_pct": None, "right_pct": round(share, 1)}
    return figures | {"bar": bar, "holds": None if least is None else share >= least, "note": note}
