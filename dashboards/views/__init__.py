"""One module per view: its data as frames, its figures, and a `VIEW` that `app` registers."""
