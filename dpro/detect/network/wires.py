"""Traffic on the wires between ranks, as the network threads of NCCL saw it: finer than one ring.

In: sends of each rank to each peer, steps and workers. Out: what `traffic.py` takes from a graph, each send a
message. A collective shows all its members together; here every wire of its ring or tree is measured by
itself, without waits for the GPU or the peer, so that senders, receivers and links can be distinguished.
"""

from __future__ import annotations

from functools import partial

import polars as pl

from dpro.detect.network.timed_calls import at_most
from dpro.detect.network.traffic import MESSAGE, Traffic
from dpro.replay.steps.typical import job_steps


def traffic_of_sends(sends: pl.DataFrame, steps: pl.DataFrame, workers: pl.DataFrame) -> Traffic:
    """The traffic on the wires, without peers that sent nothing: which ranks these are is not known.

    Args:
        sends, steps, workers: the tables.
    """
    hosts = {rank: host for rank, host in workers.select("rank", "host").iter_rows() if host}
    host = [pl.col(end).replace_strict(hosts, default="", return_dtype=pl.String) for end in ("rank", "to")]
    begins = steps.select("rank", "step", "start_ns").sort("start_ns")
    places = sends.select("group", to="rank", peer_member="member").unique()
    places = places.unique(["group", "peer_member"], keep="none")
    transfers = (
        sends.filter((pl.col("time_ns") >= 0) & (pl.col("wire_ns") > 0))
        .join(places, on=["group", "peer_member"])
        .sort("time_ns")
        .join_asof(begins, left_on="time_ns", right_on="start_ns", by="rank", check_sortedness=False)
        .drop_nulls("step")
        .select(
            "bytes",
            "step",
            op=pl.lit(MESSAGE),
            members=pl.format("{},{}", "rank", "to"),
            num_ranks=pl.lit(2, pl.Int64),
            num_hosts=pl.when(host[0] == host[1]).then(1).otherwise(2).cast(pl.Int64),
            transfer_ns="wire_ns",
            whole=pl.lit(True),
        )
        .sort("step", "members", "bytes", "transfer_ns")
        .with_columns(instance=pl.int_range(pl.len()))
    )
    return Traffic(transfers, hosts, partial(at_most, transfers, job_steps(steps)), replayed=False)
