"""The small server in two pools: one process computes prompts, another decodes.

    python benchmarks/serving_server/pools.py [the options of server.py]

Both run continuous batching of transformers, which cannot hand a request over. So when the first token of a
request is ready, the prompt process takes the request's blocks of keys and values, and sends them over a
socket on loopback. The other process writes them into its own cache before the first iteration of that
request, whose prompt counts as computed except for the first token. Out: one JSON object, with the speed of
the link, measured before and after the requests with messages of the size of a mean prompt. Answers equal
those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

import server
import torch
from link import read, write

PROBE, END = "probe", "end"
PROBES = 20


def main() -> None:
    """Run one process, or both."""
    if os.environ.get("RANK"):
        listen() if os.environ["RANK"] == "1" else compute_prompts()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, *sys.argv]
    both = [
        subprocess.Popen(
            command,
            env=os.environ | {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "POOLS_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [json.loads(process.communicate()[0]) for process in both]
    print(json.dumps(said[1] | said[0]))


def compute_prompts() -> None:
    """Compute prompts, and hand each request over after its first token."""
    args = server.arguments()
    requests = server.workload(args)
    made = {f"r{number}": output for number, (_, _, output) in enumerate(requests)}
    ready: queue.Queue[Any] = queue.Queue()
    with socket.socket() as link:
        connect(link)
        probes = [probe(link, args)]
        sender = threading.Thread(target=send_all, args=(link, ready))
        sender.start()
        with server.engine(args) as manager:
            server.warm(manager, "before")
            take_over(manager, made, ready)
            begun = time.perf_counter()
            server.send(manager, [(at, prompt, 1) for at, prompt, _ in requests], begun)
            for _ in requests:
                while manager.get_result(timeout=1) is None:
                    pass
            server.warm(manager, "after")
        ready.put(None)
        sender.join()
        probes.append(probe(link, args))
        write(link, {"what": END}, b"")
    print(json.dumps({"link_gbps": statistics.mean(probes), "kv_bytes": token_bytes(args)}))


def take_over(manager: Any, made: dict[str, int], ready: queue.Queue[Any]) -> None:
    """Copy the blocks of each request that ends, before they are free."""
    scheduler = manager.batch_processor.scheduler
    finish, (allocator,) = scheduler.finish_request, manager.batch_processor.cache.cache_allocators.values()

    def finish_request(request_id: str) -> None:
        if request_id in made:
            state = scheduler.active_requests[request_id]
            blocks = torch.tensor(allocator.block_table[request_id])
            kept = allocator._copy_view.index_select(0, blocks)
            head = {"what": request_id, "tokens": state.initial_tokens + state.generated_tokens}
            ready.put((head | {"more": made[request_id] - 1}, kept))
        finish(request_id)

    scheduler.finish_request = finish_request


def send_all(link: socket.socket, ready: queue.Queue[Any]) -> None:
    """Send copied blocks, one request after the other."""
    while (taken := ready.get()) is not None:
        write(link, taken[0], taken[1].numpy())


def listen() -> None:
    """Decode arriving requests, until the other process ends the stream."""
    args = server.arguments()
    handed: dict[str, list[int]] = {}
    answered: dict[str, list[int]] = {}
    with socket.socket() as door, server.engine(args) as manager:
        server.warm(manager, "before")
        accept_blocks(manager)
        door.bind(("127.0.0.1", int(os.environ["POOLS_PORT"])))
        door.listen(1)
        link, _ = door.accept()
        while (message := read(link))[0]["what"] != END:
            head, payload = message
            if head["what"] == PROBE:
                write(link, head, b"")
            else:
                add(manager, head, payload)
                handed[head["what"]] = head["tokens"][-1:]
        while len(answered) < len(handed):
            result = manager.get_result(timeout=1)
            if result is not None:
                answered[result.request_id] = handed[result.request_id] + result.generated_tokens
        server.warm(manager, "after")
    print(json.dumps({"requests": len(handed), "answers": server.checksum(answered)}))


def add(manager: Any, head: dict[str, Any], payload: bytearray) -> None:
    """Add a request whose tokens are all computed, except for the last one."""
    from transformers.generation.continuous_batching.requests import RequestState

    tokens = head["tokens"]
    state = RequestState(
        request_id=head["what"], initial_tokens=tokens, max_new_tokens=head["more"], eos_token_id=-1
    )
    state.remaining_prefill_tokens, state.position_offset = tokens[-1:], len(tokens) - 1
    state.handed_over = torch.frombuffer(payload, dtype=torch.uint8)
    manager.input_queue.put(state)
    manager._wake_up_loop.set()


def accept_blocks(manager: Any) -> None:
    """Write received blocks into the blocks that a request gets in its first iteration."""
    processor = manager.batch_processor
    offloading, (allocator,) = processor.offloading_manager, processor.cache.cache_allocators.values()
    restore = offloading.restore_scheduled_requests

    def restore_scheduled_requests(requests_in_batch: list[Any]) -> None:
        restore(requests_in_batch)
        for each in requests_in_batch:
            kept = each.state.__dict__.pop("handed_over", None)
            if kept is not None:
                kept = kept.view(-1, allocator.bytes_per_block)
                blocks = allocator.block_table[each.state.request_id][: len(kept)]
                allocator._copy_view.index_copy_(0, torch.tensor(blocks), kept)

    offloading.restore_scheduled_requests = restore_scheduled_requests


def token_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of keys and values of a token, in all layers."""
    return 2 * args.layers * args.hidden * 4


def probe(link: socket.socket, args: argparse.Namespace) -> float:
    """Measure the speed of the link for prompts of the mean size, in 1e9 bytes per second."""
    payload, took = b"\0" * (args.prompt * token_bytes(args)), []
    for _ in range(PROBES):
        begun = time.perf_counter()
        write(link, {"what": PROBE}, payload)
        read(link)
        took.append(time.perf_counter() - begun)
    return len(payload) / statistics.median(took) / 1e9


def connect(link: socket.socket) -> None:
    """Connect, and wait until the other process listens."""
    while link.connect_ex(("127.0.0.1", int(os.environ["POOLS_PORT"]))):
        time.sleep(0.05)


if __name__ == "__main__":
    main()
