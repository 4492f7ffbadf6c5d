"""How long a training step takes in any layout of its GPUs, and whether it fits: behind `dpro plan`.

inputs/    the model, the machine and the framework
layout     layouts as rows, all that a number of GPUs allows
layer      operations of a layer re-sized to a layout, and their time
traffic    collectives and messages
schedule   orders of micro-batches, as graphs that the engine replays
step       the step and its parts
calibrate  what measured steps say about other layouts, and intervals
memory     what a GPU holds, and whether it fits
plan       all layouts, ranked
"""
