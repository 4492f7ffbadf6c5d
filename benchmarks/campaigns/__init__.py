"""Campaigns: real jobs that fail at random moments, are started again, and resume from their checkpoints.

job         the training job: steps that sleep, and shards that are really written
design      how it saves and recovers
hosts       the torchruns of a job on two hosts
campaign    starts it, injects failures, keeps what really happened
compared    what dpro accounts and predicts, beside that
published   closed forms and published figures, beside what is simulated
"""
