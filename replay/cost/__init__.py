"""What things cost: transfers, kernels, memory, the work of a step.

What a transfer takes says, for a run with transfers of its own, a measured table, or another algorithm than
ran, `transfers.py`; for links of which nothing was recorded, `machine.py`; for transfers that share the links
of a known fabric, `fabric/`. What an operation takes on a device says `kernels/estimate.py`, and by it
`kernels/recorded.py` of the kernels of a trace.

Some are asked twice, and answer differently. Products with fewer bits are a roofline (`kernels/roofline.py`)
for `precision:dtype=`, which knows the run's GPU and shapes alone, and an estimate for `precision:budget=`,
which compares precisions module by module. Products larger than any that was measured are refused by the
estimate: layouts then take 0.8 of the sheet's peak, servers 0.6. A message within a host has half of its
links for `dpro plan`, since stages send both ways at once, and all of them where pretended ranks send one.
"""

HOLDS = 0.9  # of what is measured, that an interval is meant to hold
