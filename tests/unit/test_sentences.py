"""The list of all sentences has those that a command printed, and nothing that only programs read."""

from __future__ import annotations

import re

import pytest

from tests.sentences import page, sentences_of

SOURCE = """
'''What a module is, is not printed.'''
QUERY = "SELECT a FROM b WHERE c"
def name(run):
    '''Nor is this.'''
    raise ValueError(f"{run}: no such run, nor {len(run)} others")
@click.command()
def command():
    '''Do this and that.

    And more of it.
    '''
"""


def test_sentences_are_those_that_can_be_printed_with_their_lines():
    assert list(sentences_of(SOURCE)) == [
        (6, "{run}: no such run, nor {len(run)} others"),
        (8, "And more of it."),
        (8, "Do this and that."),
    ]


@pytest.mark.slow
def test_what_a_command_prints_is_found():
    text = re.sub(r"\\{[^}]*\\}", "{}", page())
    for sentence in (
        "Find what limits a distributed training job",
        "No slow rank or component found",
        "did you mean",
        "is not being recorded now",
    ):
        assert sentence in text
