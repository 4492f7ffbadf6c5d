"""What servers do: the iterations of their engine, and the requests that they answer.

served         the records of both, whichever engine says them
apart          where an engine writes whose process has no rank
transformers   continuous batching of Hugging Face transformers
vllm           the V1 engine of vLLM
sglang         the scheduler of SGLang
"""
