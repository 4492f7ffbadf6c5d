"""What a job that stands still waits for: from what each rank called last to the ranks at fault.

It needs calls only, no graph and no clocks.
"""
