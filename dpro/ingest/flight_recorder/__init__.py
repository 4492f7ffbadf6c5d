"""PyTorch's flight recorder: the ring of recent collectives of one rank.

reader      one dump as a `RankTrace`
entries     the calls in it as rows of `collectives`
repeated    which of several dumps of one rank count
"""

from dpro.ingest.flight_recorder.reader import is_dump, read_dump

__all__ = ["is_dump", "read_dump"]
