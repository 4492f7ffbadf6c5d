"""What servers do: the iterations of their engine, and the requests that they answer.

served         the records of both, whichever engine says them
transformers   continuous batching of Hugging Face transformers
"""
