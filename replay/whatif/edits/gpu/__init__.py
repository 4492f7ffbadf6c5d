"""Edits of kernels.

kernels      fused optimizers, compilation, precision
cuda_graph   kernels launched as one graph
device       the same job on another GPU
"""
