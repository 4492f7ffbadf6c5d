"""Probe of deep windows: every operator, kernel and launch of a few steps, the same on every rank.

windows             the probe: opens and closes windows, and answers requests for them
plan, agreement     which steps they are, by their cost; how rank 0 announces them to the other ranks
opened, kineto      one window that is open; one recording of Kineto
modules             names of modules as ranges of Kineto
tail                how far a GPU has come with the work of a window
foreign, ranges     the user's own profilers, which windows make room for; ranges that outlive a recording
"""
