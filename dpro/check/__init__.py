"""Checking hosts outside of a job: what each computes, copies and exchanges, against its peers."""
