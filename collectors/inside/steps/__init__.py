"""Probes and core of steps: where each ends, how long it took on the device, what the process did in it.

stepping            from optimizer updates to steps that all ranks number equally
naming              probe: steps that the user names
inference           probe: jobs that never update an optimizer: each call of the model is a step
model_calls         probe: what model is trained, and what its calls are given
looking             the thread from which these two look at the job's
gpu_steps           probe: how long steps take on the device, by timing events
host                probe: garbage collection, CPU time, waiting for a core
data, batches       probe: waiting for a DataLoader; how much work a batch is, by the sizes of its tensors
checkpoints         saves and loads: how long they took, and of which file
stopwatch           how long something took so far
aside               probe: saving checkpoints, work without gradients, compilation
"""
