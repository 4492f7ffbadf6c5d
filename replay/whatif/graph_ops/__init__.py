"""What edits are made of."""
