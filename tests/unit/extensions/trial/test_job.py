import pytest

from dpro.extensions.trial.job import first_error_in

TORCHRUN = """
E0722 10:00:01.5 140 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-07-22_10:00:01
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 141)
============================================================
"""
RANKS = """step 1
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "train.py", line 7, in <module>
[rank1]:     main()
[rank0]:   File "train.py", line 9, in <module>
[rank1]: ValueError: out of cheese
[rank0]: RuntimeError: Connection closed by peer
"""


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        (RANKS + TORCHRUN, "ValueError: out of cheese"),
        (
            "Traceback (most recent call last):\n  File x\n    y\nKeyError: 'a'\nlater" + TORCHRUN,
            "KeyError: 'a'",
        ),
        (
            "step 1\nterminate called after throwing an instance of 'c10::Error'" + TORCHRUN,
            "terminate called",
        ),
        (TORCHRUN, ""),
        ("loading\nout of cheese\n", "out of cheese"),
        ("", ""),
        (
            "[default1]:Traceback (most recent call last):\n[default1]:  File x\n[default1]:OSError: gone",
            "OSError: gone",
        ),
        ("Traceback (most recent call last):", ""),
    ],
)
def test_first_error_is_that_of_a_rank_and_not_its_launchers_account(printed, error):
    found = first_error_in(printed.splitlines())
    assert found.startswith(error)
    assert bool(found) == bool(error)
