"""Edits of how a model is cut over ranks.

pipeline   another schedule of micro-batches, stages of equal work
chunked/   work and its communication in chunks that overlap
"""
