"""What-if edits: small frozen dataclasses, each of which turns one graph into another.

edit, grammar          what an edit declares; how it is written
registry, listing      which edits there are, and an edit from its text; help and docs of them
predict                one edit, or several together: step times, interval, critical path
search, together       what helps alone and together; pareto: time against memory
sensitivity            what limits the step, and how much faster it has to be
edits/                 one module per family of edits
ranks/                 predictions for runs whose ranks are condensed
graph_ops/             what edits are made of: selected work, scopes, shards, a graph that is changed
"""
