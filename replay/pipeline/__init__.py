"""Runs of whole operations: pipeline-parallel jobs as their framework traces them.

operations     what each operation is, in which step, on which stage
dependencies   what depends on what within a step
oplevel        the graph
schedules/     published orders of micro-batches
bubbles        how long stages stand still
"""
