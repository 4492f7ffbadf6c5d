"""`dpro watch` beside jobs.

latency   how long after a fault it is named, in real jobs
scale     what the command takes, and how soon it names a fault, by the number of ranks
"""
