"""Advice to make an edit for its predicted gain alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from dpro.analysis.analysis import Analysis
from dpro.replay.gradient_buckets import framework_of, half_precision_setting
from dpro.replay.whatif.edit import EFFORTS
from dpro.schema import BUCKETS
from dpro.verdict.advice import FIRST, Advice, best_of, by_edit
from dpro.verdict.facts import JobFacts
from dpro.verdict.sources.parts import EVEN_SEQUENCES

REDUCER = r"^DistributedDataParallel\.forward|distributed(::|\.ddp\.)reducer"  # ranges of DDP


# Changes advised for their gain alone: the edit, the kind of advice, and what to do.
_EDITS: Sequence[tuple[str, str, str]] = (
    ("optimizer:impl=fused", "optimizer", "a fused optimizer (fused=True)"),
    (EVEN_SEQUENCES, "balance-input", "spread long and short samples evenly over the ranks"),
)


def make_sure_edits(facts: JobFacts, limit: str) -> Iterator[Advice]:
    """Advise edits that take a line or a setting, if they certainly gain, or treat the limit."""
    for text, kind, do in _EDITS:
        prediction = best_of(facts, [text])
        if prediction is not None and (prediction.effect == "faster" or kind in FIRST.get(limit, ())):
            yield by_edit(kind, do, prediction)
    prediction = best_of(facts, ["compress:to=bf16"])
    if prediction is not None and (prediction.effect == "faster" or "compression" in FIRST.get(limit, ())):
        do, effort = reducing_in_bf16(facts.analysis)
        yield replace(by_edit("compression", do, prediction), effort=effort)
    prediction = best_of(facts, facts.candidates("bucket"))
    if prediction is not None and prediction.effect == "faster":
        (bucket,) = prediction.edits
        yield by_edit("buckets", f"{bucket.describe()}: {bucket.how()}", prediction)


def reducing_in_bf16(analysis: Analysis) -> tuple[str, str]:
    """Return how to reduce gradients in bf16 with what reduces them in the job, and the effort.

    DDP shows itself by its ranges, or by its buckets.
    """
    buckets = analysis.run.table(BUCKETS, ["source"])["source"]
    framework = framework_of(analysis.run)
    if framework:
        return f"reduce gradients in bf16: {half_precision_setting(framework, 'bf16')}", EFFORTS["line"]
    if buckets.str.starts_with("DDP").any() or analysis.spans["name"].str.contains(REDUCER).any():
        return "reduce gradients in bf16 (a communication hook of DDP)", EFFORTS["line"]
    return "reduce gradients in bf16, in the code that reduces them", EFFORTS["code"]
