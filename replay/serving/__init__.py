"""Inference servers: their requests, served again by the engine as it is or as it would be.

engine     an engine's limits and the cost of an iteration; requests served by them
loop       the compiled loop of iterations
fit        the cost of an iteration, from requests or iterations that were recorded
recorded   the server of a recording: its limits and its cost
changes    changes to a server, as they are written
inside     changes to the inside of iterations, by the graph of deep windows
predict    what requests would have seen of a changed server
search     which changes allow the most requests per second under a goal
sized      the cost of an iteration of a model on a device, before it was measured
steady     an engine that a fixed number of clients keep busy, in closed form
"""
