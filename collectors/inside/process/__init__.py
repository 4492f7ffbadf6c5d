"""The process itself: its settings, its threads, and how it ends."""
