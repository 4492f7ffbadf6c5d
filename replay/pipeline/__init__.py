"""Whole operations of pipeline-parallel jobs: as their framework traces them, or as they were recorded.

operations     what each operation is, in which step, on which stage
recorded       the same of jobs that were recorded with all that their operations consist of
ranges         operations of imported traces, by the ranges that PyTorch marks
device_times   when GPUs did what was launched for each operation
dependencies   what depends on what within a step
oplevel        the graph
schedules/     published orders of micro-batches
partition      layers divided over stages
bubbles        how long stages stand still
"""
