"""Data: small recorded runs that ship with dpro, and the program they were recorded from."""
