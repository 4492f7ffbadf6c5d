"""What `dpro whatif` says of edits that a run cannot answer."""

from __future__ import annotations

from dpro.cli.run.whatif import refused_in_words
from dpro.replay.whatif.predict import Refusal


def test_edits_that_are_refused_for_one_reason_share_a_line() -> None:
    refused = [Refusal("paths", "no topology"), Refusal("gc", "no pauses"), Refusal("spray", "no topology")]
    assert refused_in_words(refused) == [
        "not answered: paths, spray: no topology",
        "not answered: gc: no pauses",
    ]
