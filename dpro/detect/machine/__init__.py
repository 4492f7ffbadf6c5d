"""The state of hosts and GPUs while the job ran.

oversubscribed   hosts with more threads than cores, and what that explains of other findings
idle_gpus        GPUs that idle on all ranks because of their hosts
devices          which sampled GPUs are those of which ranks
gpu_state        clocks held down, and errors, as evidence of slow and hanging ranks
link_state       what links of GPUs and ports of hosts counted, as evidence of a slow network and of hangs
xids             what reported errors mean
telemetry        which counters clearly differ between two stretches of a job
"""
