"""The fabric of a job, as typed documents.

topology   what it has: hosts, tiers of switches, paths
traffic    what a run loads on it, which connections meet where, what that costs, and paths that avoid it
"""
