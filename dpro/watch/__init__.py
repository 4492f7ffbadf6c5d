"""Diagnosis while a job runs: what is new is read, the same detectors look at it, and findings are told
once."""
