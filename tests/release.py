"""Build a release, try every command in fresh environments, and say what to upload.

python -m tests.release [--dist DIST] [--extras EXTRA …] [--json]

DIST gets the wheel and the sdist. Into one new environment for the base and each extra the wheel is installed
with pip, as a user would, and every command is run on a sample run: it works, or names an extra that is not
there; with all of them it has to work. The changelog needs a dated heading for the version. Exits with 1
where anything fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpro._version import __version__

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "sample_traces" / "slow_rank"
EXTRAS = (
    "replay",
    "dashboard",
    "perfetto",
    "query",
    "watch",
    "remote",
    "zstd",
    "mcp",
    "otlp",
    "notify",
    "dask",
    "all",
)
NAMED = re.compile(r"dpro-toolkit\[(\w+)\]")
# Each with what it needs besides, {run}, {out} (a folder) filled in. Those that run a job are for PyTorch.
COMMANDS: Mapping[str, str] = {
    "version": "--version",
    "info": "info {run}",
    "explain": "explain {run}",
    "report": "report {run}",
    "report as HTML": "report {run} --html {out}/report.html",
    "report as Markdown": "report {run} --markdown {out}/report.md",
    "replay": "replay {run}",
    "whatif": "whatif {run} --edit no-comm",
    "edits": "whatif --list",
    "diagnose": "diagnose {run}",
    "diff": "diff {run} {run}",
    "plan": "plan --gpus 8 --model {model} --device H100",
    "topology": "topology --fat-tree 4",
    "goodput": "goodput {run}",
    "export to Chrome": "export {run} --chrome {out}/trace.json",
    "export to Perfetto": "export {run} --perfetto {out}/trace.pftrace",
    "query": "query {run} VALUES(1)",
    "help of memory": "memory --help",
    "scrub": "scrub {run} {out}/copy",
    "import": "import {trace} -o {out}/imported",
    "import of zstd": "import {zstd} -o {out}/imported-zstd",
    "remote run": "info file://{run}",
    "history": "history",
    "ledger": "ledger",
    "recipe": "recipe slurm",
    "completion": "completion bash",
    "help of dashboard": "dashboard --help",
    "help of mcp": "mcp --help",
    "help of serving": "serving --help",
    "help of watch": "watch --help",
    "help of check": "check --help",
    "help of record": "record --help",
    "help of try": "try --help",
}
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
}  # fmt: skip
TRACE = {
    "schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1 + 20 * n, "dur": 9}
        for n in range(5)
    ],
}  # fmt: skip


class Tried(NamedTuple):
    """What became of a command in an environment: `works`, the name of an extra, or its error."""

    extra: str
    command: str
    outcome: str


def build(dist: Path) -> list[Path]:
    """The wheel and the sdist, in a folder that holds nothing else."""
    shutil.rmtree(dist, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT], check=True, cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return sorted(dist.iterdir())


def install(wheel: Path, extra: str, where: Path) -> Path:
    """The `dpro` of a new environment that has the wheel with an extra; empty for the base."""
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    pip = [where / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "-c", ROOT / "constraints.txt", f"{wheel}[{extra}]" if extra else wheel], check=True
    )
    return where / "bin" / "dpro"


def outcomes(dpro: Path, extra: str, folder: Path) -> list[Tried]:
    """What becomes of each command, away from the checkout and with a cache of its own."""
    files = {"run": shutil.copytree(SAMPLE, folder / "run"), "out": folder / "out"}
    files["out"].mkdir()
    for name, text in (("model", MODEL), ("trace", TRACE)):
        files[name] = folder / f"{name}.json"
        files[name].write_text(json.dumps(text))
    files["zstd"] = folder / "trace.json.zst"
    files["zstd"].write_bytes(_zstd(json.dumps(TRACE).encode()))
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    plain |= {"DPRO_CACHE": str(folder / "cache"), "DPRO_HISTORY": "off", "HOME": str(folder)}
    return [_tried(dpro, extra, name, command.format(**files).split(), folder, plain)
            for name, command in COMMANDS.items()]  # fmt: skip


def _tried(
    dpro: Path, extra: str, name: str, words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Tried:
    done = subprocess.run(
        [dpro, *words], cwd=folder, env=dict(environment), capture_output=True, text=True, timeout=300
    )
    said = done.stderr.strip().splitlines()
    needs = NAMED.search(said[-1]) if said and len(said) <= 2 else None
    if done.returncode == 0:
        return Tried(extra, name, "works")
    return Tried(
        extra, name, needs[1] if needs else f"exit code {done.returncode}: {said[-1] if said else ''}"
    )


def _zstd(content: bytes) -> bytes:
    """A zstd frame with one raw block: no library is needed to write it."""
    size = len(content)
    block = (size << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0xA0]) + size.to_bytes(4, "little") + block + content


def faults(tried: Sequence[Tried]) -> list[str]:
    """Commands that neither work nor name an extra, or that name one which is there."""
    wrong = []
    for row in tried:
        place = f"{row.command}, with {row.extra or 'no extra'}"
        if row.outcome == "works":
            continue
        if row.outcome not in EXTRAS:
            wrong.append(f"{place}: {row.outcome}")
        elif row.outcome == row.extra or row.extra == "all":
            wrong.append(f"{place}: names {row.outcome}, which is there")
    return wrong


def undated() -> str:
    """Why the changelog is not that of this version; empty where it is."""
    text = (ROOT / "CHANGELOG.md").read_text()
    dated = re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    return "" if dated else f"CHANGELOG.md has no dated heading for {__version__}"


def main() -> int:
    """Build, try, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS), choices=EXTRAS)
    parser.add_argument("--json", action="store_true", dest="as_json")
    options = parser.parse_args()
    files = build(options.dist)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    tried: list[Tried] = []
    for extra in ("", *options.extras):
        with tempfile.TemporaryDirectory() as folder:
            dpro = install(wheel, extra, Path(folder) / "environment")
            tried += outcomes(dpro, extra, Path(folder))
        if not options.as_json:
            works = sum(row.outcome == "works" for row in tried if row.extra == extra)
            print(f"{extra or 'no extra':<12} {works} of {len(COMMANDS)} commands work", flush=True)
    wrong = [*faults(tried), *filter(None, [undated()])]
    if options.as_json:
        works = len(tried) - sum(row.outcome != "works" for row in tried)
        figures = {"works": works, "wrong": wrong}
        print(
            json.dumps(
                {"release": {"n": len(tried), "figures": figures, "bar": "0 wrong", "holds": not wrong}}
            )
        )
        return int(bool(wrong))
    print(*wrong, sep="\n")
    if not wrong:
        print(f"git tag v{__version__}; git push origin v{__version__}")
        print(f"python -m twine upload {' '.join(str(file) for file in files)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
