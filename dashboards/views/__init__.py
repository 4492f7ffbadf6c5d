"""One module per view: its data as frames, its figures, and a `VIEW` that `app` registers.

verdict     healthy or not, what is slow, what would help, how much to trust it
heatmap     a value per rank and step
breakdown   where the time of steps went
collectives transfers by size with the fitted lines; which rank comes last
matrix      transfers between pairs of ranks and hosts; waits between ranks
kernels     a table of what takes the time
roofline    what matmuls reach of what their GPU can do; part of the view of kernels
telemetry   sampled values, on the time axis of the timeline
hang        which rank waits for which in a job that stands still
difference  what explains that another run is faster or slower
"""
