"""Per-tensor plans: how each gradient is reduced, searched, predicted and kept in a file."""
