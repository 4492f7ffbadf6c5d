"""Ranks that the others wait for: by replay of deep windows, and by calls alone.

replayed      heals one rank at a time, all in one batched replay
axes          along which axis of parallelism others wait for it
persistent    work that is clearly longer, at a cost that comes and goes
masked        work that is far longer, mostly hidden by queued work
own_time      a rank's own work in each step, from the times of its calls on one clock
excess        own work against peers and against before
from_calls    what the others wait for a rank that is late
jitter        ranks that vary far more than their peers
timed_ranks   the same for GPUs, where calls were timed
input_bound   a job whose training loop waits for its input on every rank
causes        why a rank takes longer, by the host's counters and by the graph
"""
