"""A small server to record: continuous batching of transformers, a random Llama, seeded arrivals.

In: sizes of the model and the batch, a rate, lengths. Out: one JSON object with the client's measurements.
Arrivals are drawn before the server starts, and sent from a thread of its process. Before and after them a
few equal requests are answered one by one (names `warm...`), which show the speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WARM_PROMPT, WARM_OUTPUT, WARM_REQUESTS = 48, 25, 8


def arguments() -> argparse.Namespace:
    """Parse the settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=30, help="how many arrive")
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument("--prompt", type=int, default=192, help="mean tokens of a prompt")
    parser.add_argument("--output", type=int, default=32, help="mean tokens of an answer")
    parser.add_argument("--max-batch", type=int, default=64, help="requests in a batch, at most")
    parser.add_argument(
        "--chunk", type=int, default=0, help="tokens in a batch, at most; 0 for whole prompts"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def workload(args: argparse.Namespace) -> list[tuple[float, list[int], int]]:
    """Draw requests: seconds of arrival, prompt, and number of tokens to answer with."""
    draw, at, requests = random.Random(args.seed), 0.0, []
    for _ in range(args.requests):
        at += draw.expovariate(1.0) / args.rate
        length = max(4, int(args.prompt * draw.uniform(0.5, 1.5)))
        made = max(2, int(args.output * draw.uniform(0.5, 1.5)))
        words = random.Random(args.seed + length)  # separate, so that lengths do not depend on words
        requests.append((at, [words.randrange(3, 1000) for _ in range(length)], made))
    return requests


def model(args: argparse.Namespace) -> torch.nn.Module:
    """Return a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=8192, attn_implementation="sdpa", eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@contextmanager
def engine(args: argparse.Namespace) -> Iterator[Any]:
    """Run the manager of continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(1)
    config = ContinuousBatchingConfig(
        page_size=64, num_blocks=768, max_batch_tokens=args.chunk or 4096,
        max_requests_per_batch=args.max_batch, allow_block_sharing=False,
    )  # fmt: skip
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=args.output)
    with model(args).continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        yield manager


def warm(manager: Any, when: str) -> None:
    """Answer equal requests one by one."""
    for number in range(WARM_REQUESTS):
        manager.add_request([5] * WARM_PROMPT, request_id=f"warm-{when}-{number}", max_new_tokens=WARM_OUTPUT)
        while manager.get_result(timeout=1) is None:
            pass


def serve(args: argparse.Namespace) -> dict[str, float]:
    """Answer all requests; return counts, times and a checksum of the answers."""
    requests = workload(args)
    answered: dict[str, list[int]] = {}
    with engine(args) as manager:
        warm(manager, "before")
        begun, cpu = time.perf_counter(), time.process_time()
        thread = threading.Thread(target=send, args=(manager, requests, begun))
        thread.start()
        while len(answered) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None:
                answered[result.request_id] = result.generated_tokens
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
        thread.join()
        warm(manager, "after")
    tokens = sum(map(len, answered.values()))
    return {
        "requests": len(requests), "tokens": tokens, "seconds": seconds, "cpu_seconds": cpu,
        "tokens_per_s": tokens / seconds, "answers": checksum(answered),
    }  # fmt: skip


def checksum(answered: dict[str, list[int]]) -> int:
    """Return a number that is equal for equal answers."""
    return zlib.crc32(json.dumps(sorted(answered.items())).encode())


def send(manager: Any, requests: list[tuple[float, list[int], int]], begun: float) -> None:
    """Send each request when it is due."""
    for number, (at, prompt, made) in enumerate(requests):
        time.sleep(max(0.0, begun + at - time.perf_counter()))
        manager.add_request(prompt, request_id=f"r{number}", max_new_tokens=made)


if __name__ == "__main__":
    print(json.dumps(serve(arguments())))
