"""What `dpro try` prints of its result.

In: the document of a try. Out: lines on the console.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpro.cli.output import console

if TYPE_CHECKING:
    from dpro.trial.documents import TimesDocument, TryDocument


def print_result(document: TryDocument) -> None:
    """Print what was predicted and measured."""
    from dpro.trial.places import in_words

    out = console()
    times, predicted = document.measured, document.predicted
    for line in in_words(document.applied):
        out.print(f"  applied    {line}")
    if predicted:
        out.print(f"  predicted  {_line(predicted)}")
    out.print(f"  measured   {_line(times)} instead of {document.baseline_ms:.2f} ms: {document.verdict}")
    pairs = f"{document.pairs} pair{'s' * (document.pairs > 1)}"
    timed = ", timed by the device" if document.clock == "device" else ""
    out.print(f"             {pairs} of recordings, {document.steps} steps each at least{timed}")
    if document.noise is not None:
        out.print(
            f"             noise: one recording of the job as it is is {document.noise:.1%} from the next"
        )
    if document.samples != 1:
        out.print(f"             a step has {document.samples:g} times as many samples: x is per sample")
    if document.stopped:
        out.print(f"             {document.stopped}")
    out.print(f"  training   {_training_line(document)}")
    if document.pairs == 1:
        out.print("             a single pair: the interval does not know how much jobs differ by themselves")
    if predicted:
        off = predicted.ms / times.ms - 1
        inside = "inside" if document.inside_interval else "outside"
        out.print(f"  the prediction is off by {off:+.1%}; what was measured is {inside} its interval")


def _training_line(document: TryDocument) -> str:
    """What the losses say."""
    from dpro.trial.training import NOT_SEEN

    learnt = document.training
    if learnt is None:
        seen = "loss was not seen: " if document.not_compared == NOT_SEEN else "losses are not compared: "
        return f"{seen}{document.not_compared}"
    base, changed = (
        f"{each:.4g}" if each is not None else "not finite" for each in (learnt.base, learnt.changed)
    )
    spread = (
        "" if learnt.spread is None else f"; recordings of the job as it is differ by {learnt.spread:.2g}"
    )
    says = "training differs" if learnt.differs else "training is the same"
    return f"{says}: loss {changed} instead of {base}, over {learnt.passes} passes{spread}"


def _line(times: TimesDocument) -> str:
    interval = f"{times.low_ms:.2f} to {times.high_ms:.2f}"
    return f"x{times.speedup:.2f}  {times.ms:.2f} ms per step ({interval})"
