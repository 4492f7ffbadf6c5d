"""A slow twin of `dpro.extensions.serving.engine`: lists instead of arrays, one idea a line.

No evicted request finds its blocks again, tokens are not guessed, and arrivals are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpro.extensions.serving.engine import Engine, IterationCost
from dpro.extensions.serving.fit import seconds


@dataclass
class Request:
    """A request: what it needs, and how far it is."""

    arrival: int
    prompt: int
    output: int
    computed: int = 0
    produced: int = 0
    blocks: int = 0
    chunk: int = 0
    first: int = -1
    end: int = -1

    @property
    def lacks(self) -> int:
        """Tokens that are known and not computed."""
        return 0 if self.produced >= self.output else self.prompt + self.produced - self.computed


@dataclass
class Twin:
    """An engine and its requests."""

    engine: Engine
    requests: list[Request]

    def __post_init__(self) -> None:
        self.waiting = sorted(self.requests, key=lambda each: each.arrival)
        self.evicted: list[Request] = []
        self.running: list[Request] = []
        self.free = self.engine.kv_tokens // self.engine.block_tokens

    def reserve(self, request: Request, tokens: int) -> bool:
        """Take blocks, if there are enough."""
        if not self.engine.kv_tokens:
            return True
        needed = max(-(-(request.computed + tokens) // self.engine.block_tokens) - request.blocks, 0)
        if needed > self.free:
            return False
        self.free -= needed
        request.blocks += needed
        return True

    def plan(self, now: int) -> int:
        """Give each request its chunk; tokens of all."""
        budget, crowded = self.engine.token_budget, False
        for request in list(self.running):
            if request not in self.running:
                continue
            tokens = min(request.lacks, budget)
            while not self.reserve(request, tokens):
                crowded = True
                last = self.running[-1]
                if last.produced >= last.output:
                    tokens = 0
                    break
                self.running.pop()
                self.free += last.blocks
                last.blocks = last.computed = last.chunk = 0
                self.evicted.append(last)
                if last is request:
                    tokens = 0
                    break
            request.chunk = tokens
            budget -= tokens
        while not crowded and budget > 0 and len(self.running) < self.engine.max_requests:
            queue = self.evicted if self.evicted else self.waiting
            if not queue or queue[-1 if self.evicted else 0].arrival > now:
                break
            request = queue[-1 if self.evicted else 0]
            tokens = min(request.lacks, budget)
            if self.engine.whole_prompts and tokens < request.lacks and budget < self.engine.token_budget:
                break
            if not self.reserve(request, tokens):
                break
            queue.remove(request)
            request.chunk = tokens
            self.running.append(request)
            budget -= tokens
        return self.engine.token_budget - budget

    def compute(self) -> tuple[int, int, int, int]:
        """Advance each by its chunk: tokens of prompts, decodes, their context, pairs."""
        prefill = decodes = context = pairs = 0
        for request in self.running:
            tokens, before = request.chunk, request.computed
            request.chunk = 0
            if not tokens:
                continue
            if request.produced and tokens == 1:
                decodes += 1
                context += before
            else:
                prefill += tokens
                pairs += tokens * before + tokens * tokens // 2
            request.computed += tokens
            if request.computed == request.prompt + request.produced:
                request.produced += 1
        return prefill, decodes, context, pairs

    def release(self, now: int) -> None:
        """Note first tokens and ends."""
        for request in list(self.running):
            if request.produced and request.first < 0:
                request.first = now
            if request.produced >= request.output:
                request.end = now
                self.free += request.blocks
                self.running.remove(request)

    def run(self, cost: IterationCost) -> None:
        """Serve all."""
        import numpy as np

        now, planned = self.waiting[0].arrival, 0
        while self.running or self.evicted or self.waiting:
            if not planned:
                if not self.running and not self.evicted:
                    now = max(now, self.waiting[0].arrival)
                planned = self.plan(now)
                if not planned:
                    return
            held = (np.array([float(each)]) for each in self.compute())
            stop = now + max(1, round(float(seconds(cost, *held)[0]) * 1e9))
            if self.engine.ahead:
                planned = self.plan(now)
                self.release(stop)
            else:
                self.release(stop)
                planned = self.plan(stop)
            now = stop
