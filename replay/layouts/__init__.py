"""How long a training step takes in any layout of its GPUs, and whether it fits: behind `dpro plan`."""
