"""How long operations take on devices, at any precision: measured, learned, fitted, or by the data sheet.

estimate      the one interface: operations on a device to microseconds, intervals, methods
operations    what operations compute and move, a row each
tiles         the formula of ten numbers per device and precision
fitting       those numbers from measured operations
coefficients  the numbers that ship, and what devices have in common
calibration   the numbers of a device from a few operations of the user's own trace
kernels       kernels of a trace on another device
tables        measured tables that a user has
sources       what is known once products that a user has measured are read
learned       regression trees on what the formula misses of such a table
bands         intervals, of operations and of their sums
"""
