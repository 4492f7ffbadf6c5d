"""Forward and backward of each micro-batch, of jobs that pipeline: seen where their frameworks begin them."""
