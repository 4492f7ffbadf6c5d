"""`dpro watch` beside jobs.

latency   time from a fault until it is named, in real jobs
scale     cost of the command, and time until it names a fault, by the number of ranks
"""
