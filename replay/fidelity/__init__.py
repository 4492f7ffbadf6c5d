"""How far a replay is from the trace, what it rests on, and how far to trust what it predicts.

fit             errors by step, rank and start
evidence        recorded and inferred dependencies, times taken from the trace
overlap         how much compute and communication slow each other down side by side
missing_ranks   extrapolation to ranks that are missing
facts           what some ranks show of all this, in sums that add up
grade           the figures that predictions stand or fall with, their bars, their score
accuracy        trust: all of these, and what the trace cannot answer
by_rank         a run that is built, condensed and judged rank by rank
saved           a graph and its trust, or condensed ranks, as one file
"""
