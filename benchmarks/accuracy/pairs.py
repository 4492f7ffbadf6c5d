"""Jobs before and after one change; `whatif.py` records both and predicts the second from the first.

In: nothing. Out: pairs. In the controlled class, which needs root, layers sleep a fixed time, the ranks
talk over links of a fixed speed (`limited_link.py`) and run before all other programs, so that two shared
cores are no limit; in the noisy class they compute. Real models are changed in the way `dpro try` does it.
"""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass

from benchmarks.recording import cable
from dpro.extensions.trial.changes import Change, parse_change


@dataclass(frozen=True)
class Job:
    """A job to record.

    Attributes:
        arguments: of the program.
        link: rate of its links in Mbit/s; 0 for loopback.
        program: of `benchmarks/recording`, and its first words.
        delay_us: of its link, each way.
        ranks: how many there are.
        change: what `dpro try` changes in it, as on its command line; empty for no change.
        shapes: whether shapes of operators are recorded, which predictions of other layouts need.
    """

    arguments: str
    link: int = 0
    program: str = "cpu_job.py ddp"
    delay_us: int = 0
    ranks: int = 2
    change: str = ""
    shapes: bool = False

    @property
    def cable(self) -> tuple[str, ...]:
        """The command that runs another command over the job's link."""
        return cable(self.link, self.delay_us, self.ranks)

    @property
    def made(self) -> tuple[Change, ...]:
        """The changes that `dpro try` makes to the job."""
        return tuple(map(parse_change, shlex.split(self.change)))

    @property
    def title(self) -> str:
        """A few words that describe the job."""
        words = self.program.split()[1:]
        return f"{' '.join(words)}, {self.ranks} ranks{', computing' if not self.link else ''}"

    def changed(self, change: str) -> Job:
        """Return this job with a change."""
        return dataclasses.replace(self, change=change)

    def over(self, link: int) -> Job:
        """Return this job over a link of another rate."""
        return dataclasses.replace(self, link=link)


@dataclass(frozen=True)
class Pair:
    """A job before and after a change.

    Attributes:
        name: what is changed.
        before: the unchanged job.
        after: the changed job.
        edits: as `dpro whatif --edit` takes them; {link} is replaced by the speed-up of the link, {added} by
            the us that a small message takes longer, measured on an idle link. None predicts no change.
        cycle: steps of the changed job per step that communicates.
        uneven: whether the change affects single steps, so that means are compared.
        layout: for `dpro plan --keep`, where the change is another layout, which no edit makes.
    """

    name: str
    before: Job
    after: Job
    edits: tuple[str, ...]
    cycle: int = 1
    uneven: bool = False
    layout: str = ""

    @property
    def controlled(self) -> bool:
        """Whether the job computes nothing, so that the link limits it."""
        return bool(self.before.link)

    @property
    def families(self) -> set[str]:
        """Names of the edits that predict the change."""
        return {edit.partition(":")[0] for edit in self.edits}


SLEEPING = "--layers 8 --width 512 --layer-ms 8 --first"
COMPUTING = "--layers 8 --width 512 --layer-ms 0 --products 40"
READING = f"{SLEEPING} --input-ms 40"
LINK = ("network:bandwidth={link}",)


def of_sleeping_layers() -> list[Pair]:
    """Return pairs of the job whose layers only sleep."""
    found = []
    for rate in (200, 500):
        one, many = Job(SLEEPING, rate), Job(f"{SLEEPING} --bucket-mb 1", rate)
        found.append(Pair(f"buckets 25 to 1 MB, {rate} Mbit/s", one, many, ("bucket:mb=1",)))
        found.append(Pair(f"buckets 1 to 25 MB, {rate} Mbit/s", many, one, ("bucket:mb=25",)))
    slow, fast = Job(SLEEPING, 200), Job(SLEEPING, 500)
    late, many = Job(f"{SLEEPING} --slow-rank 1 --slow-ms 50", 500), Job(f"{SLEEPING} --bucket-mb 1", 500)
    sharded, ahead, further = (
        Job(f"{SLEEPING} --prefetch {layers}", 500, "cpu_job.py fsdp") for layers in range(3)
    )
    near, far = (Job(f"{SLEEPING} --bucket-mb 1", 200, delay_us=delay) for delay in (1, 1000))
    found += [
        Pair("1 ms of delay each way, 200 Mbit/s", near, far, ("delay:us={added}",)),
        Pair("link 200 to 500 Mbit/s", slow, fast, LINK),
        Pair("link 500 to 200 Mbit/s", fast, slow, LINK),
        Pair("link 200 to 1000 Mbit/s", slow, Job(SLEEPING, 1000), LINK),
        Pair("fp16 hook, 200 Mbit/s", slow, Job(f"{SLEEPING} --hook fp16", 200), ("compress:to=fp16",)),
        Pair(
            "PowerSGD of rank 2, 200 Mbit/s", slow, Job(f"{SLEEPING} --hook powersgd", 200),
            ("compress:powersgd_rank=2",),
        ),
        Pair("straggler healed, 500 Mbit/s", late, fast, ("heal:rank=1",)),
        Pair(
            "parameters averaged every 4 steps, 200 Mbit/s", slow, Job(f"{SLEEPING} --local-updates 4", 200),
            ("local-updates:every=4",), cycle=4,
        ),
        Pair(
            "gradients accumulated over 2 batches, 500 Mbit/s", fast, Job(f"{SLEEPING} --accumulate 2", 500),
            ("accumulate:steps=2",),
        ),
        Pair(
            "a DataLoader worker, 500 Mbit/s", Job(READING, 500), Job(f"{READING} --workers 1", 500),
            ("workers:count=1",),
        ),
        Pair("FSDP gathers a layer ahead, 500 Mbit/s", sharded, ahead, ("prefetch:ahead=1",)),
        Pair("FSDP gathers two layers ahead, 500 Mbit/s", sharded, further, ("prefetch:ahead=2",)),
        Pair(
            "two changes: link 200 to 500 Mbit/s, buckets 25 to 1 MB", slow, many, (*LINK, "bucket:mb=1"),
        ),
        Pair("nothing: static_graph, 500 Mbit/s", fast, Job(f"{SLEEPING} --static-graph", 500), ()),
    ]  # fmt: skip
    return found


def of_exchanges() -> list[Pair]:
    """Return pairs of that job whose gradients are exchanged in ways that DDP has no option for."""
    whole, many, slow = (
        Job(f"{SLEEPING}{words}", rate, delay_us=delay)
        for words, rate, delay in (("", 500, 0), (" --bucket-mb 1", 500, 0), (" --bucket-mb 1", 200, 1))
    )
    found = []
    for what, edit, hook, jobs in (
        ("reduced after backward", "overlap:mode=off", "after", (many, slow)),
        ("used a step late", "overlap:mode=full", "late", (whole, slow)),
    ):
        for job in jobs:
            after = dataclasses.replace(job, arguments=f"{job.arguments} --hook {hook}")
            found.append(Pair(f"gradients {what}, {job.link} Mbit/s", job, after, (edit,)))
    for job in (whole, slow):
        after = dataclasses.replace(job, program="cpu_job.py priority")
        found.append(Pair(f"gradients by priority, {job.link} Mbit/s", job, after, ("priority:mb=1",)))
    return found


def of_computing_layers() -> list[Pair]:
    """Return pairs of `cpu_job.py` whose layers multiply matrices, over loopback."""
    return [
        Pair(
            "buckets 25 to 1 MB, loopback, computing", Job(COMPUTING), Job(f"{COMPUTING} --bucket-mb 1"),
            ("bucket:mb=1",),
        ),
        Pair(
            "fp16 hook, loopback, computing", Job(COMPUTING), Job(f"{COMPUTING} --hook fp16"),
            ("compress:to=fp16",),
        ),
        Pair(
            "foreach AdamW, computing", Job(f"{COMPUTING} --optimizer adamw"),
            Job(f"{COMPUTING} --optimizer foreach"), ("optimizer:impl=foreach",),
        ),
        Pair(
            "fused AdamW, computing", Job(f"{COMPUTING} --optimizer adamw"),
            Job(f"{COMPUTING} --optimizer fused"), ("optimizer:impl=fused",),
        ),
        Pair("nothing: static_graph, computing", Job(COMPUTING), Job(f"{COMPUTING} --static-graph"), ()),
    ]  # fmt: skip


PACED = "--width 192 --block-ms 8 --first"
LATE, RANK = "slow:rank=1,ms=30", "heal:rank=1"


def tried(job: Job, *changes: str) -> list[Pair]:
    """Return a pair for each change that `dpro try` makes to a job."""
    pairs = []
    for text in changes:
        change = parse_change(text)
        cycle = int(change.arguments["every"]) if change.family == "reduction" and change.uneven else 1
        uneven = change.uneven and cycle == 1
        pairs.append(Pair(f"{job.title}: {text}", job, job.changed(text), change.edits, cycle, uneven))
    return pairs


def undone(job: Job, change: str, edit: str) -> Pair:
    """Return the pair from a changed job back to the plain one, for an edit that undoes the change."""
    return Pair(f"{job.title}, with {change}: {edit}", job.changed(change), job, (edit,))


def linked(job: Job, rate: int) -> Pair:
    """Return a pair of a job and that job over another link."""
    return Pair(f"{job.title}: link {job.link} to {rate} Mbit/s", job, job.over(rate), LINK)


def of_models() -> list[Pair]:
    """Return pairs of real models whose blocks also sleep, over limited links."""
    gpt = Job(PACED, 500, "model_job.py gpt ddp")
    reading = dataclasses.replace(gpt, arguments=f"{PACED} --input-ms 40")
    making = dataclasses.replace(gpt, arguments=f"{PACED} --objects 10000")
    resnet = Job("--width 320 --block-ms 8 --first", 500, "model_job.py resnet ddp")
    dlrm = Job("--width 512 --block-ms 8 --first", 500, "model_job.py dlrm ddp")
    sharded = Job(PACED, 500, "model_job.py gpt fsdp")
    # A delay makes small messages count, which `tc tbf` would let through for free.
    split = Job("--width 384 --block-ms 8 --first", 200, "model_job.py gpt tp", delay_us=1)
    gpt4, resnet4, dlrm4, sharded4 = (
        dataclasses.replace(job, ranks=4) for job in (gpt, resnet, dlrm, sharded)
    )
    return [
        *tried(
            gpt, "bucket:mb=1", "compress:to=fp16", "local-updates:every=4", "accumulate:steps=2",
            "batch:factor=2", "recompute:module=blocks.*", "no-comm", LATE,
        ),
        undone(gpt, "bucket:mb=1", "bucket:mb=25"), undone(gpt, LATE, RANK),
        linked(gpt, 200), linked(gpt.over(200), 500),
        *tried(reading, "hide-input", "workers:count=1"), *tried(making, "gc"),
        *tried(resnet, "bucket:mb=1", "compress:to=bf16", "accumulate:steps=2", "batch:factor=2"),
        undone(resnet, "bucket:mb=1", "bucket:mb=25"),
        *tried(dlrm, "accumulate:steps=2", "batch:factor=2", LATE, "bucket:mb=1", "compress:to=fp16"),
        undone(dlrm, LATE, RANK),
        linked(dlrm, 200),
        *tried(sharded, "prefetch:ahead=1", "accumulate:steps=2", "batch:factor=2", LATE),
        undone(sharded, LATE, RANK), linked(sharded, 200),
        *tried(split, "batch:factor=2", LATE), undone(split, LATE, RANK), linked(split, 500),
        Pair("gpt ddp: 2 to 4 ranks", gpt, gpt4, ("data-parallel:ranks=4",)),
        *tried(resnet4, "bucket:mb=1", "accumulate:steps=2", LATE), undone(resnet4, LATE, RANK),
        *tried(dlrm4, "batch:factor=2"), *tried(sharded4, "prefetch:ahead=1"),
    ]  # fmt: skip


def of_chunks() -> list[Pair]:
    """Return pairs of layers that communicate in the middle of their work, whole and cut up by hand."""
    split, exchanged = "split:op={},work=Product,chunks=4", "moe-pipeline:chunks=4"
    found = []
    for kind, width, edit in (
        ("row", 4096, split.format("all_reduce")),
        ("column", 2048, split.format("all_gather")),
        ("column", 4096, split.format("all_gather")),
        ("experts", 2048, exchanged),
        ("experts", 4096, exchanged),
    ):
        whole = Job(f"--width {width} --first", 500, f"groups_job.py {kind}", delay_us=1)
        cut = dataclasses.replace(whole, arguments=f"--width {width} --chunks 4 --first")
        found.append(Pair(f"{kind} of {width}, 500 Mbit/s: in 4 chunks", whole, cut, (edit,)))
    return found


def of_layouts() -> list[Pair]:
    """Return pairs of a GPT whose blocks sleep, in layouts with more ranks, which `dpro plan` predicts."""
    # Messages of tensor parallelism exceed the burst that a shaped link lets through at once.
    usual, large = "--width 128 --block-ms 24 --first", "--width 256 --batch 32 --block-ms 6 --first"
    found = []
    for kind, axes, link, words in (
        ("tp", "dp=1,tp=4", 500, large),
        ("pp", "dp=1,pp=4", 500, usual),
        ("ddp", "dp=4", 200, usual),
    ):
        two = Job(words, link, f"model_job.py gpt {kind}", shapes=True)
        four = dataclasses.replace(two, ranks=4)
        found.append(Pair(f"gpt {kind}: layout of 2 to 4 ranks", two, four, (), layout=axes))
    return found


def of_grids() -> list[Pair]:
    """Return pairs of layers that are both tensor and data parallel, changed along one of these axes."""
    job = Job("--dp 2 --first", 500, "groups_job.py row", ranks=4)
    twice, small, sharded, ahead = (
        dataclasses.replace(job, arguments=f"--dp 2 {words} --first")
        for words in ("--accumulate 2", "--bucket-mb 1", "--sharded", "--sharded --prefetch 1")
    )
    even = Job("--dp 2 --first", 500, "groups_job.py row")
    uneven = dataclasses.replace(even, arguments="--dp 2 --uneven 48 --first")
    one, three = (
        Job(f"--dp {replicas} --first", 500, "groups_job.py row", ranks=2 * replicas) for replicas in (1, 3)
    )
    return [
        Pair("dp 2 x tp 2: gradients accumulated over 2 batches", job, twice, ("accumulate:steps=2",)),
        Pair("dp 2 x tp 2: buckets 25 to 1 MB", job, small, ("bucket:mb=1",)),
        Pair("dp 2 x tp 2: FSDP gathers a layer ahead", sharded, ahead, ("prefetch:ahead=1",)),
        Pair("dp 2 x tp 2 to dp 1 x tp 2", job, one, ("data-parallel:ranks=1",)),
        Pair("dp 2 x tp 2 to dp 3 x tp 2", job, three, ("data-parallel:ranks=3",)),
        Pair("dp 2: as many tokens on each rank", uneven, even, ("balance:over=sequences",)),
    ]


def of_computing_models() -> list[Pair]:
    """Return pairs of real models that compute on the two cores, over loopback."""
    gpt = Job("--width 256 --block-ms 0 --optimizer adamw --first", program="model_job.py gpt ddp")
    making = dataclasses.replace(gpt, arguments=f"{gpt.arguments} --objects 10000")
    resnet = Job("--width 256 --block-ms 0 --batch 32 --first", program="model_job.py resnet ddp")
    dlrm = Job("--width 512 --block-ms 0 --optimizer adamw --first", program="model_job.py dlrm ddp")
    return [
        *tried(
            gpt, "optimizer:impl=fused", "optimizer:impl=foreach", "batch:factor=2", "accumulate:steps=2",
            "recompute:module=blocks.*", LATE,
        ),
        undone(gpt, LATE, RANK), *tried(making, "gc"),
        *tried(resnet, "batch:factor=2", "recompute:module=blocks.*", LATE),
        *tried(dlrm, "optimizer:impl=fused", "accumulate:steps=2"),
    ]  # fmt: skip


def pairs() -> list[Pair]:
    """Return all pairs, those of real models first."""
    return [
        *of_models(),
        *of_layouts(),
        *of_computing_models(),
        *of_sleeping_layers(),
        *of_exchanges(),
        *of_computing_layers(),
        *of_chunks(),
        *of_grids(),
    ]
