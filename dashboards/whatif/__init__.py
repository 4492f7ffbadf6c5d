"""Edits and their predictions.

workbench  the view: edits, predicted step, the critical path before and after
waterfall  the contributions that add up to a difference
limits     how the step depends on the speed of each part of the machine
tries      the ledger: predicted and measured changes
"""
