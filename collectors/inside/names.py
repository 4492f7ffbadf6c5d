"""Names that both the job and observers outside it use: of files, of mesh axes, of pipelines' operations."""

from __future__ import annotations

from itertools import count, takewhile
from pathlib import Path

WANTED = "wanted.json"  # beside the folders of the launches: changes when an observer wants the latest calls
IMPORTED = "imported"  # in the folder of a launch: some process of the job has imported torch
SHOWN = "calls-"  # what names of dumps for them begin with
LACKS = "lacks.txt"  # what the PyTorch of a process does not record, a sentence a line
LAST = "last"  # there once the interpreter goes and all calls are saved: none came later
STALL = "stall"  # what dumps of calls are called that were made while no step ended
CHECKPOINTS = "checkpoints.jsonl"  # saves and loads of a process, a line each
REQUESTS = "requests.jsonl"  # requests that a process served, a line each when scheduled and when ended
ENGINE = "engine.json"  # which engine of a server a process drives
ENGINES = "engine-"  # how names of folders begin, in that of the launch, of engines in a process without rank
PIPELINE = "pipeline.json"  # which part of the model a process of a pipeline has
STARTED = "started.json"  # when a process had got how far on its way to the first step
FATAL = "fatal.txt"  # where the threads of a process were when a signal ended it that it caused itself
RAISED = "raised.json"  # the exception that ended a process
FAILED = (
    "raised-"  # how names begin of the same, in the folder of the launch, of a process that had not trained
)
TENSOR_AXES = ("tp", "tensor", "tensor_parallel", "model", "model_parallel", "mp")  # of meshes of devices

# Operations of pipelines, as records number them. The loss of a micro-batch belongs to its forward.
FORWARD, BACKWARD = "forward", "backward"
BACKWARD_INPUT, BACKWARD_WEIGHT = "backward_input", "backward_weight"
LOSS = "loss"
OPERATIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, LOSS)
PRETENDED = "pretended"  # what files of a pretended rank's calls are called
MAIL = "mail"  # in the folder of a launch: what pretended ranks leave for each other
WAITS = "waits-"  # how names begin there of ranks that wait for another's mail
REPLACED = "replaced.json"  # the program that a process replaced itself by (`exec`), and when


def image_folder(launch: Path, host: str, pid: int, image: int) -> Path:
    """The folder of one of the programs that a process has been (`exec`) and that recorded.

    Args:
        image: the program's number, from 0.
    """
    return launch / f"{host}-{pid}{f'_{image}' * (image > 0)}"


def next_image(launch: Path, host: str, pid: int) -> int:
    """Return how many programs a process has been that recorded."""
    return sum(1 for _ in takewhile(lambda image: image_folder(launch, host, pid, image).is_dir(), count()))


def pid_and_image(folder: str) -> tuple[int, int]:
    """The two of an `image_folder` by its name.

    Raises:
        ValueError: it is the name of another folder.
    """
    pid, _, image = folder.rpartition("-")[2].partition("_")
    return int(pid), int(image or 0)
