"""Cost models of transfers, kernels, memory and the work of a step.

`transfers.py` estimates transfers from those of the run itself, from a measured table, or for an algorithm
that did not run; `machine.py` those over links that were never recorded; `fabric/` those that share the links
of a known fabric. `kernels/estimate.py` estimates an operation on a device, and `kernels/recorded.py` applies
it to the kernels of a trace.

Some quantities have two models, which differ. Products with fewer bits are a roofline (`kernels/roofline.py`)
for `precision:dtype=`, which has only the run's GPU and shapes, and an estimate for `precision:budget=`,
which compares precisions module by module. Products larger than any measured one are refused by the
estimate: layouts then take 0.8 of the sheet's peak, servers 0.6. A message within a host has half of its
links for `dpro plan`, since stages send both ways at once, and all of them where pretended ranks send one.
"""

HOLDS = 0.9  # share of measurements that an interval should contain
