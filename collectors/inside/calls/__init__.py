"""Probes of communication: collective calls, messages, gradient buckets and device meshes.

coverage            turns PyTorch's flight recorder on where it is off; which calls it does not record
flight, rings       dumps of the flight recorder; its rings of calls, and how many calls there were, without
                    asking a GPU
stalls              messages of gloo, and what a process waits for while no step ends
buckets             gradient buckets of DDP and FSDP2
megatron, deepspeed those of Megatron-core and DeepSpeed
mesh                axes of device meshes
coordinates         the same of Megatron-core and DeepSpeed, which make none
"""
