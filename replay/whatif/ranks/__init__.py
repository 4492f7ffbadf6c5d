"""Predictions for runs whose ranks are condensed: each rank is changed and condensed again by itself."""
