"""Which hosts were found at fault before: a small history of this user, over all runs.

culprit     the one host that a finding is about, or why there is none
store       findings by host, and commands that were run for them, in SQLite; what `dpro history` answers
recurrence  what is said of a host that comes back
"""
