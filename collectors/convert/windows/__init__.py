"""Deep windows of one process, on their way into tables.

batches             the windows that were saved, a batch of them at a time
cut, merge          a recording cut to the window's steps; its collectives joined with the calls they are
lost, cost          GPU work that a window lacks; what windows cost the job
"""
