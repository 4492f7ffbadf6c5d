"""Which rows of several ranks are one collective, and how far their clocks are apart.

match    collectives and messages across ranks, without trusting clocks
align    each host's clock against the reference: offset, drift, uncertainty, and their evidence
pretended  clocks of ranks that ran one after the other
clocks   one clock against another: recorded comparisons, a line through them, exact arithmetic with it
"""
