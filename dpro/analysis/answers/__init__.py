"""What the commands that read a run answer, as typed documents: for `--json`, notebooks and `dpro mcp`.

Each module computes one answer from an `Analysis` or a run, prints nothing, and declares its document:

info, telemetry   what a run holds and what it lacks; what was sampled beside the job
layout            where each rank stands on the axes of parallelism
deciding          what decides the step time, and by how much starts are off, also where ranks are condensed
replay            how well the graph explains what was measured, and what decides the step time
whatif            predictions of given edits, or of a search; sensitivity; time against memory
searches          what an earlier search found, while nothing that it depends on has changed
diagnosis         what is slow or broken, from dumps, from always-on tables, or from the replay
fabric            what a fabric has; what a run loads on it, and which connections meet
difference        what explains that one run takes longer per step than another
"""
