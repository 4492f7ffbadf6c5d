"""Edits of how a model is cut over ranks.

layout     other degrees of parallelism, on as many ranks or others
pipeline   another schedule of micro-batches, stages of equal work
sequences  even tokens, by what each rank was handed
chunked/   work and its communication in chunks that overlap
stages     layers moved between stages
skip       micro-batches that skip stages
fill       other work in the bubbles
"""
