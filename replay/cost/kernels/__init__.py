"""Times of operations on devices at any precision: measured, learned, fitted, or from the data sheet."""
