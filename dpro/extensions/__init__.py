"""dpro's own extensions: all that goes beyond recording one job, explaining it and finding its faults."""
