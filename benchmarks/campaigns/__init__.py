"""Campaigns: real jobs that fail at random moments, are started again, and resume from their checkpoints.

job         the training job: steps that sleep, and shards that are really written
design      how it saves and recovers
hosts       the torchruns of a job on two hosts
campaign    starts a job, injects failures, keeps what really happened
compared    dpro's accounts and predictions, beside what really happened
published   closed forms and published figures, beside the simulation
"""
