"""Detection of hangs: from the last calls of each rank to the ranks at fault.

Needs recorded calls only, no graph and no clocks.
"""
