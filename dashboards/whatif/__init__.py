"""Edits and their predictions.

workbench  the view: edits, predicted step, the critical path before and after
waterfall  the contributions that add up to a difference
limits     what each part of the machine is worth
tries      the ledger: predicted and measured changes
"""
