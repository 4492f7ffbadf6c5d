"""Probes of servers: the iterations of their engine, and the requests that they answer.

Each engine has a module. One that fails is logged, and the others go on.
"""

from __future__ import annotations

from _dpro_inside_the_job.recorder import Recorder

from . import sglang, transformers, vllm


def install(recorder: Recorder) -> None:
    """Set the hooks on the engine that the job will import."""
    for engine in (transformers, vllm, sglang):
        recorder.call(engine.install, recorder)
