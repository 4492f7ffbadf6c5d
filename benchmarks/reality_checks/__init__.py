"""Parts of `benchmarks/reality.py`: published tables as layouts, and how predictions are judged."""
