"""Changes to the job that `dpro try` makes from the inside, one file per family.

In: the changes that the launcher was asked for. Out: a changed job, and `applied.json`, which says what was
changed where, and what could not be. Loaded only where changes were asked for.
"""
