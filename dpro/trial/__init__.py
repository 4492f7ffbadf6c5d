"""The loop: a change is predicted, made to the real job, measured, and remembered."""
