"""What a process worked on, from its records.

operations   forward and backward of each micro-batch, of jobs that pipeline
served       iterations of a server's engine, and its requests
"""
