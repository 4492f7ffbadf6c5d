"""Edits of the layout of a recorded job: its data-parallel ranks, its pipeline, and chunks of its work."""
