"""What is not needed to record one job and to answer what it does, what would help and what is broken."""
