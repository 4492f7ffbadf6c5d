"""How fast dpro is, and what recording costs.

fabric          seconds of next hops, hashes, plans and rates of a large job
engine          edges per second of the replay engine, beside a readable twin and networkx
answer          seconds from a run to its first answers
edits           seconds of each edit
import_kineto   megabytes per second of imports, beside another tool
startup         milliseconds until a command begins
overhead        what recording costs a job
copies          any number of copied ranks of a graph
"""
