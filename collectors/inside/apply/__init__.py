"""Changes to the job that `dpro try` makes from the inside, family by family.

In: the changes that the launcher was asked for. Out: a changed job, and `applied.json`, which says what was
changed where, and what could not be. Loaded only where changes were asked for.

`report.py` calls the function of each family in a process that begins to train, with

    report: whether and where this change was made; each family says so there, or why it refuses.
    recorder: of the process; it calls the family on steps and at the end.
    arguments: of the change, by name, as `dpro/trial/changes.py` makes them.
"""
