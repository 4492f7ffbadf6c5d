"""Work and the communication next to it, cut into chunks that run side by side.

places         where a collective stands in the order of its rank's work
segments       stages of work and collectives that depend on each other, one after the other
costs          what a chunk takes
rebuild        a graph with segments as pipelines of chunks
edit           what the edits share: what is cut, and the interval
split          a matmul and its collective
moe_pipeline   exchange of tokens, experts, exchange back
"""
