"""What a recorded run says of its layers, so that other layouts of it can be computed.

repeats     stretches of a sequence that repeat
sequence    the work of a rank in order, with its products, and what is backward
stack       the layers of a step: how many, and what one takes
shapes      the model, from shapes of its products
messages    micro-batches and messages of its pipeline
links       what its own collectives say of its links
job         all of it together: the run's own layout, and layers that are re-sized from it
ranking     its layouts, ranked, and one beside its own
"""
