"""The view of a job's life: what each rank did in all its time, over all attempts.

life    the picture: steps over time, and a strip for each rank
view    the view, with its tables
"""
