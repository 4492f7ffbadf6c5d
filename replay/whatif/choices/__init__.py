"""What is chosen bucket by bucket or module by module, within a budget of errors that the job itself showed.

codecs      what a codec makes of a reduction of gradients, and what it costs
by_bucket   a codec for each bucket of gradients
by_module   a precision for each module
programs    the integer programs that choose
"""
