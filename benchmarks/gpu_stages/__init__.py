"""What only a GPU can say of dpro: the stages of `benchmarks/gpu.py`, and the jobs that they run."""
