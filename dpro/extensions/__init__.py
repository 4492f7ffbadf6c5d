"""dpro's own extensions: everything beyond recording one job, explaining it and finding its faults."""
