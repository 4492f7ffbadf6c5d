"""The command `dpro plan`: all layouts of a model on a number of GPUs, ranked, with memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dpro.cli.analysis import analyse
from dpro.cli.options import MAX_SIZE, NumberRange
from dpro.cli.output import console, json_option, print_json
from dpro.errors import UsageError
from dpro.limits import MAX_RANKS

if TYPE_CHECKING:
    from dpro.extensions.plan.answer import LayoutDocument, PlanDocument
    from dpro.extensions.plan.model import Model
    from dpro.extensions.plan.plan import MeasuredLayout

USUAL_SEQUENCE = 4096  # tokens: most models train on shorter sequences than they support
USUAL_SEQUENCES = 4  # per GPU and step
SHOWN_UNFITTING = 3
SCHEDULES = ("1f1b", "interleaved", "gpipe", "zb-h1", "zbv", "dualpipe")
_ROW = re.compile(r"^(?P<layout>.*)[:=]\s*(?P<time>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)?\s*$")


class _Asked(NamedTuple):
    config: Path | None
    gpus: int | None
    hosts_of: int
    device: str | None
    memory: float | None
    sequence: int | None
    global_batch: int | None
    keep: tuple[str, ...]
    schedules: tuple[str, ...]
    layout: str
    rows: tuple[str, ...]
    framework: str
    precision: str
    top: int

    @property
    def wanted_schedules(self) -> tuple[str, ...]:
        return SCHEDULES if "all" in self.schedules else self.schedules or SCHEDULES[:2]


@click.command()
@click.argument("run", type=click.Path(), metavar="[RUN]", required=False)
@click.option(
    "--model",
    "config",
    metavar="CONFIG",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Hugging Face config.json of the model, for planning without a run.",
)
@click.option("--gpus", type=click.IntRange(1, MAX_RANKS), help="Number of GPUs.  [default: as many as RUN]")
@click.option("--hosts-of", type=click.IntRange(1, 1024), default=8, show_default=True, help="GPUs per host.")
@click.option("--device", help="GPU model, a name from docs/devices.md.  [default: H100; RUN's own]")
@click.option(
    "--memory",
    type=NumberRange(0, 1e6, min_open=True),
    help="Memory per GPU, in GB.  [default: from its data sheet]",
)
@click.option(
    "--sequence", type=click.IntRange(1, MAX_SIZE), help="Tokens per sequence.  [default: 4096 at most]"
)
@click.option(
    "--global-batch",
    type=click.IntRange(1, MAX_SIZE),
    help="Sequences per step.  [default: 4 per GPU; as many as in RUN]",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Keep this fixed: tp=8 or recompute=full, or RUN's own value: tp; can be repeated.",
)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    type=click.Choice([*SCHEDULES, "all"]),
    help="Pipeline schedule; can be repeated.  [default: 1f1b and interleaved]",
)
@click.option(
    "--layout",
    default="",
    metavar="LAYOUT",
    help="Parallel layout of RUN, if not recorded: dp=8,tp=2,micro_batch=1.",
)
@click.option(
    "--calibrate",
    "rows",
    multiple=True,
    metavar="LAYOUT:MS",
    help="Measured step time of a layout: dp=8,tp=4,pp=2,micro_batch=1:4210ms; can be repeated.",
)
@click.option(
    "--framework",
    type=click.Choice(["megatron", "megatron-deepspeed", "nanotron"]),
    default="megatron",
    show_default=True,
    help="Framework whose kernels, overlap and stage partitioning to assume.",
)
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp8"]), default="bf16", show_default=True)
@click.option(
    "--top",
    type=click.IntRange(1, 1_000_000),
    default=15,
    show_default=True,
    help="Number of layouts to show.",
)
@json_option
def plan(run: str | None, as_json: bool, **options: Any) -> None:
    """Rank the parallel layouts of a job: throughput, step time, memory, and why some do not fit.

    \b
    dpro plan RUN --gpus 256
    dpro plan RUN --gpus 64 --keep tp --memory 80
    dpro plan --model config.json --gpus 256 --schedule all
    dpro plan --model config.json --gpus 64 --keep tp=8 --global-batch 512
    dpro plan --model config.json --gpus 64 --device A100-SXM4-80GB
    dpro plan --model config.json --gpus 256 --calibrate dp=32,tp=8:5230ms

    A layout is a choice of data (dp), tensor (tp), pipeline (pp), context (cp) and expert (ep) parallelism,
    model chunks per stage (vpp), sequences per micro-batch, ZeRO (zero) and recomputation
    (recompute=none, selective, full). With a RUN, dpro finds the layers among its operators and scales their
    measured times to each layout; RUN's own layout reproduces its measured step. With a model only, layers
    are timed from data sheets and measured kernels. Pipelines are replayed. Intervals aim at 90% coverage;
    one measured step (--calibrate) narrows them. Without a run or a measured step, the plan says that it is
    not calibrated: trust its order more than its times.
    """
    asked = _Asked(**options)
    rows = [_given_step(text) for text in asked.rows]
    kept = [part for text in asked.keep for part in _kept_parts(text, run is not None)]
    model = _model(asked.config, asked.sequence, run)
    if run is not None:
        if asked.device or asked.framework != "megatron" or asked.precision != "bf16":
            raise UsageError(
                "--device, --framework and --precision need --model without RUN: RUN has its own"
            )
        document = _of_run(run, model, asked, kept, rows)
    elif model is None:
        raise UsageError("give RUN or --model config.json")
    elif asked.gpus is None:
        raise UsageError("--gpus is required: the number of GPUs of the job")
    elif asked.layout:
        raise UsageError("--layout describes RUN: without a run, use --keep")
    else:
        document = _of_model(model, asked.gpus, asked, kept, rows)
    if as_json:
        print_json(document)
    else:
        _print(document)


def _model(config: Path | None, sequence: int | None, run: str | None) -> Model | None:
    """Read the model of a configuration, with the usual sequence unless a run or an option gives it."""
    from dpro.extensions.plan.model import read_model

    if config is None:
        return None
    model = read_model(config, sequence)
    if sequence is None and run is None and model.sequence > USUAL_SEQUENCE:
        return read_model(config, USUAL_SEQUENCE)
    return model


def _of_run(
    path: str, model: Model | None, asked: _Asked, keep: list[str | dict[str, int]], rows: list[_GivenStep]
) -> PlanDocument:
    from dpro.extensions.plan.answer import AskedRunPlan, plan_run
    from dpro.extensions.plan.layout import parse_layout
    from dpro.extensions.plan.recorded_job import GivenJob, recorded_job, usual_batch

    analysis = analyse(path)
    layout = parse_layout(asked.layout) if asked.layout else {}
    job = recorded_job(analysis.built.predictive, GivenJob(model, layout, asked.hosts_of, asked.memory))
    gpus, global_batch, assumed = asked.gpus or job.ranks, asked.global_batch, []
    if global_batch is None:
        global_batch = usual_batch(job, gpus)
        if gpus != job.ranks:
            assumed.append(f"as many sequences for each rank as in the run, {global_batch} of a step")
    if not job.on_gpu:
        assumed.append("each rank has CPU cores of its own: ranks that share cores wait for each other")
    kept = _kept(keep, job.layout.row(0, named=True))
    measured = [_measured(row, job.model, gpus, global_batch) for row in rows]
    plan = AskedRunPlan(
        gpus=gpus, global_batch=global_batch, keep=kept, measured=measured, assumed=assumed,
        schedules=asked.wanted_schedules,
    )  # fmt: skip
    return plan_run(job, analysis.run.label, plan, asked.top)


def _of_model(
    model: Model, gpus: int, asked: _Asked, keep: list[str | dict[str, int]], rows: list[_GivenStep]
) -> PlanDocument:
    from dpro.extensions.plan.answer import AskedPlan, plan_model

    assumed, global_batch = [], asked.global_batch
    if asked.sequence is None and model.sequence == USUAL_SEQUENCE:
        assumed.append(f"sequences of {USUAL_SEQUENCE} tokens: --sequence says otherwise")
    if global_batch is None:
        global_batch = USUAL_SEQUENCES * gpus
        assumed.append(f"a batch of {global_batch} sequences: --global-batch says otherwise")
    measured = [_measured(row, model, gpus, global_batch) for row in rows]
    plan = AskedPlan(
        model=model, gpus=gpus, per_host=asked.hosts_of, device=asked.device or "H100",
        memory_gb=asked.memory, global_batch=global_batch, keep=_kept(keep, {}), framework=asked.framework,
        precision=asked.precision, measured=measured, assumed=assumed, schedules=asked.wanted_schedules,
    )  # fmt: skip
    return plan_model(plan, asked.top)


def _kept_parts(text: str, of_run: bool) -> list[str | dict[str, int]]:
    """Parse `--keep`: values, or names whose value is the run's own.

    Raises:
        UsageError: a part is not a column of layouts, or has no value and no run.
    """
    from dpro.extensions.plan.layout import COLUMNS, parse_layout

    stays: list[str | dict[str, int]] = []
    for part in text.split(","):
        if "=" in part:
            stays.append(parse_layout(part))
        elif not of_run:
            raise UsageError(f"--keep {part}: give the value that stays, as {part}=8")
        elif part not in COLUMNS:
            raise UsageError(f"--keep {part}: there are {', '.join(COLUMNS)}")
        else:
            stays.append(part)
    return stays


def _kept(parts: list[str | dict[str, int]], recorded: Mapping[str, int]) -> dict[str, int]:
    values: dict[str, int] = {}
    for part in parts:
        values |= {part: recorded[part]} if isinstance(part, str) else part
    return values


class _GivenStep(NamedTuple):
    """A measured step of the command line: as it was written, its layout, milliseconds."""

    text: str
    layout: dict[str, int]
    step_ms: float


def _given_step(text: str) -> _GivenStep:
    """Parse a measured step.

    Raises:
        UsageError: the text is not one.
    """
    from dpro.extensions.plan.layout import parse_layout

    match = _ROW.match(text)
    if not match or "=" not in match["layout"]:
        raise UsageError(f"--calibrate {text}: give a layout and its step, as dp=8,tp=4,pp=2:4210ms")
    step_ms = float(match["time"]) * (1000 if match["unit"] == "s" else 1)
    return _GivenStep(text, parse_layout(match["layout"]), step_ms)


def _measured(given: _GivenStep, model: Model, gpus: int, global_batch: int) -> MeasuredLayout:
    """Check a measured step, and fill in the micro-batches that the batch implies, unless given.

    Raises:
        UsageError: the layout does not divide the model, the GPUs or the batch.
    """
    from dpro.extensions.plan.layout import gpus_of, layouts, why_undividable
    from dpro.extensions.plan.plan import MeasuredLayout

    layout, asked = dict(given.layout), f"--calibrate {given.text}"
    if why := why_undividable(model, layout):
        raise UsageError(f"{asked}: {why}")
    if "micro_batches" not in layout:
        taken = int(gpus_of(layouts([layout]))[0])
        if taken != gpus:
            raise UsageError(
                f"{asked}: its axes make {taken} of {gpus} GPUs; a step of another number of GPUs needs "
                "micro_batches="
            )
        at_once = layout.get("dp", 1) * layout.get("micro_batch", 1)
        if global_batch % at_once:
            raise UsageError(
                f"{asked}: {at_once} sequences at a time do not divide the batch of {global_batch}; give "
                "micro_batches="
            )
        layout["micro_batches"] = global_batch // at_once
    return MeasuredLayout(layout, given.step_ms)


def _print(document: PlanDocument) -> None:
    """Print the fastest layouts, the run's own, and the best of those that do not fit."""
    out = console()
    memory = f", {document.memory_gb:g} GB" if document.memory_gb else ", memory not known"
    out.print(
        f"{document.parameters / 1e9:.1f} billion parameters on {document.gpus} x {document.device} "
        f"({document.gpus_per_host} a host{memory}), {document.global_batch} sequences of "
        f"{document.sequence} tokens a step, {document.framework}, {document.precision}"
    )
    for line in document.run_facts:
        out.print(f"  - found: {line}")
    out.print(f"{document.trust[0].upper()}{document.trust[1:]}")
    for line in document.assumed:
        out.print(f"  - assumed: {line}")
    heads = f"{'tokens/s/GPU':>12}  {'of 90%':>15}  {'step':>9}  {'MFU':>4}  {'bubble':>6}  {'comm.':>5}"
    fitting = f"{document.num_fitting:,} fit; the fastest" if document.layouts else "none fits"
    out.print(f"{document.num_layouts:,} layouts, of which {fitting}:")
    out.print(f"  {heads}  memory  layout")
    for row in document.layouts:
        out.print(f"  {_figures(row)}  {row.layout}{' (tight)' if row.fits == 'tight' else ''}")
    if document.run_layout:
        out.print(f"The run's own:\n  {_figures(document.run_layout)}  {document.run_layout.layout}")
    if document.unfitting:
        which = "The fastest of those that do not fit" if document.layouts else "Those that need the least"
        out.print(f"{which}:")
    for row in document.unfitting[:SHOWN_UNFITTING]:
        out.print(f"  {_figures(row)}  {row.layout}: {row.why}")


def _figures(row: LayoutDocument) -> str:
    between = f"{row.tokens_per_s_per_gpu_low:.0f}–{row.tokens_per_s_per_gpu_high:.0f}"
    mfu = "   –" if row.mfu is None else f"{row.mfu:4.0%}"
    return (
        f"{row.tokens_per_s_per_gpu:12.0f}  {between:>15}  {row.step_ms / 1e3:7.2f} s  {mfu}  "
        f"{row.bubble:6.1%}  {row.exposed:5.1%}  {row.memory_gb:3.0f} GB"
    )
