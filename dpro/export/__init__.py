"""Timelines for other tools: what to draw (`slices`), and one file per format."""
