"""The fabric of a job, as typed documents."""
