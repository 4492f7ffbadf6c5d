"""Choices bucket by bucket or module by module, within a budget of errors that the job itself showed."""
