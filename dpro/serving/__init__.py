"""What a server's latency and throughput consist of, from its requests and the iterations of its engine.

latency     moments of requests as durations, and their percentiles
engine      what the engine did from when to when: how busy it was, what its batches held
waits       what each request waited for: a place, blocks, prompts of others, its own prompt, decoding
parts       what iterations in deep windows spend their time on
experts     how long ranks wait for each other in the exchange of experts
findings    what is slow, what it costs in ms per token and in tokens per second, what would help
answers     the same within those of `dpro report` and `dpro diagnose`
words       how numbers are written
document    the answer of `dpro serving`
"""
