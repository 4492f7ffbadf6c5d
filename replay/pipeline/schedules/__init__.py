"""In which order the stages of a pipeline do the forward and backward work of each micro-batch.

One generator per published schedule, for recorded jobs that are changed and for layouts that are planned.

tasks           pieces of work, where chunks of the model are, and what waits for what
in_turn         GPipe, 1F1B, interleaved 1F1B
zero_bubble     backward in two parts: ZB-H1, ZB-V
both_ways       DualPipe: micro-batches from both ends of the pipeline
partial         micro-batches that skip stages
branches        stages side by side
catalogue       all of them by name, with what they need
"""
