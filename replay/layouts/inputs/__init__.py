"""What a layout is computed from.

model        what a model is made of, from a Hugging Face configuration
machine      GPUs, links, host and framework, as constants with how sure each is
frameworks   how frameworks in wide use train
"""
