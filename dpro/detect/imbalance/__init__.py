"""Uneven work.

load_model      how own time grows with the amount of work, and ranks at equal work
windows         the graph with work handed out evenly, by the amounts in deep windows
stages          pipeline stages with more work than others
micro_batches   micro-batches whose forward and backward vary together
"""
