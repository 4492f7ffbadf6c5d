"""The view of a server: its requests, and the iterations of its engine."""
