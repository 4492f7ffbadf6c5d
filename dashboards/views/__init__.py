"""One module per view: its data as frames, its figures, and a `VIEW` that `app` registers.

Names pair data and figure: `part_figure` draws what `part_info` returns.
"""
