"""Where a process says which part of the model it has: read by the converter, so without torch."""

PIPELINE = "pipeline.json"
