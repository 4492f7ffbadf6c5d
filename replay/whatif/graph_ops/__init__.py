"""What edits are made of.

selected            which work an edit is for, by name, kind, rank, op, group
spans/              work within a range, a module or a function
kept_tables         tables of a run that are read once
activations         transfers whose size is that of the batch
shards              which ranks hold which part of the model
graph_editor        a graph under change: nodes added, taken out, joined
repeat              a step several times over
reductions/         gradient reductions: as recorded, and changed
shared_links        transfers that meet on a link take longer, those that no longer meet do not
shared_fabric       transfers over other cables of the fabric, or other paths
fewer_bits          matmuls at a lower precision, by a roofline
rebuilt             pipelines put together in another order
"""
