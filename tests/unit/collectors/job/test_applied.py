"""What became of changes, from the files of the job's processes."""

import json

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.finish import applied, refused_so_far
from dpro.collectors.launch.recording import Launch
from dpro.store import AppliedChange, ChangedPlace

PLACE = {"where": "DDP of Model", "instead_of": "", "times": 1}
OPTIONS = {"apply": [{"edit": "gc"}, {"edit": "bucket:mb=1"}]}


ODD = ("[1]", "7", '[{"edit": "gc"}]', '[{"edit": [], "applied": [], "refused": []}]', "null")


def process(launch, rank, said=None):
    folder = launch.raw / f"host-{rank}"
    folder.mkdir(parents=True)
    facts = {"rank": rank, "started_ns": 0}
    (folder / "facts.json").write_text(json.dumps(facts))
    if said is not None:
        (folder / "applied.json").write_text(said)
    return RecordedProcess(folder, facts)


def change(edit, places=(), reasons=()):
    return {"edit": edit, "applied": list(places), "refused": list(reasons)}


def test_each_requested_change_is_reported_with_its_rank(tmp_path):
    said = json.dumps([change("bucket:mb=1", [PLACE]), change("gc", reasons=["no"])])
    mine = process(Launch(tmp_path, "one"), 3, said)
    assert applied(mine, OPTIONS) == [
        AppliedChange("gc", 3, [], ["no"]),
        AppliedChange("bucket:mb=1", 3, [ChangedPlace(**PLACE)], []),
    ]


def test_a_process_that_says_nothing_of_a_change_has_not_made_it(tmp_path):
    for rank, said in enumerate(
        (None, "[]", "{torn", *ODD, json.dumps([change("gc"), change("bucket:mb=1")]))
    ):
        for change_made in applied(process(Launch(tmp_path, "one"), rank, said), OPTIONS):
            assert change_made.applied == []
            assert "ended before it could report" in change_made.refused[0]


def test_without_changes_there_is_nothing_to_report(tmp_path):
    assert applied(process(Launch(tmp_path, "one"), 0), {}) == []


def test_refusals_are_reported_while_the_job_runs(tmp_path):
    launch = Launch(tmp_path, "one")
    process(launch, 0, json.dumps([change("gc", [PLACE])]))
    assert list(refused_so_far(launch)) == []
    process(launch, 1, json.dumps([change("gc", reasons=["off already"])]))
    assert list(refused_so_far(launch)) == ["rank 1: gc: off already"]
