"""Data-parallel gradients: when each is ready, in which reduction it goes, where it is needed next.

passes      backward passes that reduce gradients, and what was recorded of their buckets
buffers     the same of DeepSpeed's buffers
inferred    the same from a trace that does not say: calls, bytes, accumulations of gradients
buckets     each reduction of a run with its gradients, as a table
frameworks  whose settings change the reductions of a run
uses        where in the forward pass each parameter is needed first
"""
