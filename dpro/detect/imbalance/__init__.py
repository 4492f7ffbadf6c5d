"""Uneven work.

load_model      how own time grows with the workload, and ranks at equal work
rebalanced      the graph with balanced work, by the amounts in deep windows
stages          pipeline stages with more work than others
micro_batches   micro-batches whose forward and backward vary together
"""
