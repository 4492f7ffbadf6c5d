"""How long operations take on devices, at any precision: measured, learned, fitted, or by the data sheet."""
