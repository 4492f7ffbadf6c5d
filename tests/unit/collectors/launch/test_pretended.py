"""Which ranks of a larger job a command is run as, and what is refused."""

import pytest

from dpro.errors import UsageError
from dpro.extensions.pretend.ranks import Pretended, environment_of, parse_ranks, refuse_launchers


def test_ranks_are_numbers_and_ranges_once_each_in_order():
    assert parse_ranks("8,0-2,1", 256) == (0, 1, 2, 8)


@pytest.mark.parametrize("text", ["", "a", "3-", "5-3", "-1", "0,,1"])
def test_ranks_that_name_none_are_refused(text):
    with pytest.raises(UsageError, match="--pretend-ranks"):
        parse_ranks(text, 256)


def test_a_rank_that_the_job_does_not_have_is_refused():
    with pytest.raises(UsageError, match="rank 300 is not in --pretend-world 256, whose ranks are 0 to 255"):
        parse_ranks("0,300", 256)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "train.py"],
        ["/opt/bin/torchrun", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["accelerate", "launch", "train.py"],
    ],
)
def test_a_command_that_starts_ranks_itself_is_refused(command):
    with pytest.raises(UsageError, match="starts ranks itself"):
        refuse_launchers(command)


def test_a_script_is_not_taken_for_a_launcher():
    refuse_launchers(["python", "train.py", "--backend", "x", "torchrun"])


def test_a_rank_gets_what_a_launcher_would_set():
    found = environment_of(11, Pretended(20, (11,), 8))
    expected = {"RANK": "11", "WORLD_SIZE": "20", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
    assert expected.items() <= found.items()
    assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("1", "3")
