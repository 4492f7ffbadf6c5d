"""One module per view: its data as frames, its figures, and a `VIEW` that `app` registers.

What `part_info` returns, `part_figure` draws: so it is with all pairs of such names.
"""
