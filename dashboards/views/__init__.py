"""One module per view: its data as frames, its figures, and a `VIEW` that `app` registers.

verdict     whether the run is healthy, what is slow, what would help, how far to trust predictions
heatmap     a value per rank and step
breakdown   where the time of steps goes
collectives transfers by size with the fitted lines; which rank comes last
matrix      transfers between pairs of ranks and hosts; waits between ranks
kernels     a table of kernels or operators by their time
roofline    throughput of matmuls against the limits of their GPU; part of the view of kernels
telemetry   sampled values, on the time axis of the timeline
hang        which rank waits for which in a job that hangs
plan        throughput of the job's layouts against their memory, which are best
pipeline    forward and backward of each micro-batch on each stage; how long stages stand still
difference  what explains that another run is faster or slower
layout      where ranks stand on the axes of parallelism, coloured by what they wait, work or cost
"""
