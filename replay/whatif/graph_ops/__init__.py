"""Graph operations that edits are built from."""
