"""What several formats leave to be inferred from the spans of one rank."""
