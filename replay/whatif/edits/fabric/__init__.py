"""Edits of the network: they need the topology of a run.

paths       other paths, and other cables
neighbours  ranks on other hosts, and other jobs on the same cables
other_runs  what another run sends on the same fabric, step for step
assignment  which host has the work of which, so that what exchanges much is near
"""
