"""The process itself: its settings, its GPU, its threads, and how it ends."""
