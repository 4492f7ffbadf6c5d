"""How long steps take, which of them are pauses, and where their time went: from tables alone.

durations   how long each step took: the one source of every statistic of steps
typical     the typical step, the mean step with pauses, which steps are pauses
host        waiting for data, garbage collection, waiting for a core, in each step
breakdown   compute, communication, host and idle time per step and rank; per kernel;
            per collective, waiting apart from transfer
"""
