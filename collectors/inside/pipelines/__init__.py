"""Forward and backward of each micro-batch, of jobs that pipeline: seen where their frameworks begin them.

facts          the file that says which part of the model a process has
operations     records of what a process did, whichever framework it uses
pipelining     torch.distributed.pipelining
megatron       Megatron-core's schedules
deepspeed      DeepSpeed's PipelineEngine
"""
