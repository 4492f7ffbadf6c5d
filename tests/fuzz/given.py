"""What is given beside traces, changed: configurations of models, logs of requests, descriptions of fabrics.

In: a random generator, a number, an empty folder. Out: arguments of `dpro`. Files of each format are here,
and others that are too deep or too long for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from msgspec.json import encode

from dpro.extensions.fabric.fabrics import FabricSize, fat_tree, rail_optimised
from dpro.topology.file import as_toml
from dpro.topology.kept import PathsFile
from tests.fabrics import SIZE, on_cable
from tests.fuzz.mutate import cut, of_bytes, of_json, of_text
from tests.fuzz.pool import Commands
from tests.fuzz.runs import copied, in_a_fabric

DEEP = 50_000

_LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu",
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "head_dim": 128,
}  # fmt: skip
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "model_type": "deepseek_v2", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_GPT2 = {
    "model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
    "n_positions": 1024, "activation_function": "gelu_new",
}  # fmt: skip
CONFIGURATIONS: tuple[Mapping[str, Any], ...] = (
    _LLAMA, _LLAMA | _MIXTRAL, _LLAMA | _DEEPSEEK, _GPT2, {"model_type": "gemma3", "text_config": _LLAMA},
)  # fmt: skip
OPTIONS_OF_PLANS = (
    "--keep=tp=8,pp=2", "--keep=recompute=full", "--keep=zero=1,micro_batch=2", "--schedule=all",
    "--calibrate=dp=2,tp=4,micro_batch=1:5230ms", "--memory=80", "--sequence=4096", "--global-batch=64",
    "--hosts-of=8", "--device=A100-SXM4-80GB", "--framework=nanotron", "--precision=fp8", "--top=3",
)  # fmt: skip


def changed(random: Random, content: bytes) -> bytes:
    """Text that is nearly right: other values, words or bytes, cut off, or in another encoding."""
    ways = [of_text, of_text, of_bytes, cut]
    if content[:1] in (b"{", b"["):
        ways += [of_json, of_json]
    content = random.choice(ways)(random, content)
    if random.random() < 0.05:
        encoding = random.choice(("utf-16", "utf-8-sig", "utf-32-le", "cp500"))
        return content.decode(errors="replace").encode(encoding, errors="replace")
    return content


def text_changed(random: Random, text: str) -> str:
    """An argument that is nearly right; none has a zero byte."""
    return of_text(random, text.encode()).replace(b"\0", b"").decode(errors="surrogateescape")


def of_a_model(random: Random, number: int, folder: Path) -> Commands:
    """A configuration of a model, changed, and what else is said of the job."""
    configuration = CONFIGURATIONS[number % len(CONFIGURATIONS)]
    if number % 2:
        configuration = configuration | {
            name: random.choice((0, 1, 2, 3, 7, 60, 100, 4096, 1 << 17, 1 << 24, (1 << 24) + 1, None, True))
            for name in random.sample(sorted(configuration), random.choice((1, 1, 2)))
        }
    content = json.dumps(configuration, indent=1).encode()
    if number % 10 == 8:
        begin, end = random.choice(((b"[", b"]"), (b'{"text_config":', b"}"), (b'{"a":[', b"]}")))
        middle = random.choice((b"", content, b"9" * 10_000))
        content = begin * DEEP + middle + random.choice((b"", end * DEEP))
    elif number % 10 in (2, 4, 6):
        content = changed(random, content)
    config = folder / "config.json"
    config.write_bytes(content)
    asked = random.sample(OPTIONS_OF_PLANS, random.choice((0, 0, 1, 3)))
    if number % 10 in (0, 5):
        asked = [text_changed(random, option) for option in asked or [random.choice(OPTIONS_OF_PLANS)]]
        asked = [option for option in asked if option.startswith("-")]
    gpus = random.choice(("1", "8", "24", "64", "5040", "262144"))
    return [["plan", "--model", str(config), "--gpus", gpus, *asked, *random.choice(([], ["--json"]))]]


def _jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def engine_log(rows: int) -> bytes:
    """Lines with all that can be said of a request."""
    return _jsonl(
        [
            {"request_id": f"r{at}", "arrival_time": at * 0.01, "scheduled_time": at * 0.01 + 0.02,
             "first_token_time": at * 0.01 + 0.1, "end_time": at * 0.01 + 0.9, "prompt_tokens": 60 + at,
             "completion_tokens": 30, "cached_tokens": 4, "num_preemptions": 0, "dp_rank": at % 2,
             "finish_reason": "stop"}
            for at in range(rows)
        ]
    )  # fmt: skip


def gateway_log(rows: int) -> bytes:
    line = {"timestamp": "2026-01-02T03:04:05.25Z", "status": 200, "duration_ms": 1500, "ttft_ms": 20}
    return _jsonl([line | {"usage": {"prompt_tokens": 8, "completion_tokens": 2}, "id": "x"}] * rows)


def csv_log(rows: int) -> bytes:
    head = "request,input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s\n"
    return (head + "".join(f"r{at},10,4,{at}.5,{at}.6,{at}.7,{at}.8,{at}.9\n" for at in range(rows))).encode()


def azure_log(rows: int) -> bytes:
    line = "2023-11-16 18:15:46.6805900,374,44\n"
    return ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + line * rows).encode()


def benchmark_log(rows: int) -> bytes:
    lists = {"input_lens": [5] * rows, "output_lens": [3] * rows, "ttfts": [0.1] * rows}
    lists |= {"itls": [[0.05, 0.05]] * rows, "start_times": [10.0] * rows, "errors": [""] * rows}
    return json.dumps(lists).encode()


_ATTRIBUTES = {
    "gen_ai.request.id": "cmpl-1", "gen_ai.usage.prompt_tokens": 33, "gen_ai.usage.completion_tokens": 7,
    "gen_ai.latency.time_in_queue": 0.25, "gen_ai.latency.time_to_first_token": 0.5,
}  # fmt: skip
_VALUE_OF = {str: "stringValue", int: "intValue", float: "doubleValue"}


def opentelemetry_export(rows: int) -> bytes:
    """What a collector exports, with the types of values."""
    attributes = [{"key": key, "value": {_VALUE_OF[type(of)]: of}} for key, of in _ATTRIBUTES.items()]
    start = 1743414537480756881
    spans = [
        {"name": "llm_request", "startTimeUnixNano": str(start + at), "endTimeUnixNano": str(start + 10**9),
         "attributes": attributes}
        for at in range(rows)
    ]  # fmt: skip
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()


def opentelemetry_lines(rows: int) -> bytes:
    """What its console exporter prints, a span a line."""
    times = {"start_time": "2026-01-02T03:04:01.250000Z", "end_time": "2026-01-02T03:04:03.250000Z"}
    context = {"trace_id": "0xabc", "span_id": "0x1"}
    return _jsonl([{"name": "llm_request", "context": context, **times, "attributes": _ATTRIBUTES}] * rows)


LOGS = (
    *(engine_log, gateway_log, csv_log, azure_log, benchmark_log, opentelemetry_export, opentelemetry_lines),
)
_SPAN = b'"startTimeUnixNano":"1","attributes":[{"key":"a","value":{"intValue":"1"}}]'
TOO_MUCH = (
    b'{"resourceSpans":' + b"[" * 990 + b"]" * 990 + b"}",
    b'{"resourceSpans":' + b'{"a":' * 900 + b"{" + _SPAN + b"}" + b"}" * 901,
    b'{"arrival_time":1,"usage":' + b'{"a":' * 980 + b"1" + b"}" * 981 + b"\n",
    b"[" * DEEP,
    b'{"a":' * DEEP,
    b"arrival_time,latency\n1," + b"9" * 200_000 + b"\n",
    b'arrival_time,latency\n"1' + b"\n" * 200_000,
    b"arrival_time," * DEEP + b"\n" + b"1," * DEEP,
    b'{"input_lens":[' + b"1," * DEEP + b"1]}",
    b'{"arrival_time":' + b"9" * 4000 + b',"latency":1}\n',
    b'{"arrival_time":1e18,"latency":8e18}\n{"arrival_time":-9e18,"end_time":8.9e18}\n',
    b"arrival_s,last_token_s,prompt_tokens\n8999999999999999999,8999999999999999999,8.9e18\n",
)


def of_requests(random: Random, number: int, folder: Path) -> Commands:
    """A log of requests, changed, alone or with another; then what a server's answers are from it."""
    log, run = folder / random.choice(("log.jsonl", "log.csv", "log", "log.json")), str(folder / "run")
    if number % 10 == 9:
        content = random.choice(TOO_MUCH)
    else:
        content = changed(random, LOGS[number % len(LOGS)](random.choice((1, 2, 40))))
    log.write_bytes(content)
    command = ["import", "--requests", str(log), "-o", run]
    if number % 7 == 3:
        (folder / "other.csv").write_bytes(csv_log(3))
        command += ["--requests", str(folder / "other.csv")]
    if number % 11 == 5:
        return [["import", str(log), "-o", run]]
    answers = [["serving", run, "--json"], ["serving", run, "--edit", "arrivals:rate=2"], ["report", run]]
    return [command, ["info", run, "--json"], random.choice(answers)]


SLURM = b"""# a comment
SwitchName=leaf1 Nodes=node[1-2] LinkSpeed=100
SwitchName=leaf2 \\
  Nodes=node3,node4
SwitchName=top Switches=leaf[1-2]
"""
XML = b"""<system version="1"><cpu numaid="0" host_hash="0x1">
<pci busid="0000:00:00.0" class="0x060400" link_speed="32.0 GT/s PCIe" link_width="16">
<pci busid="0000:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="90" gcn="gfx942"><nvlink target="0000:00:00.0" count="18"/></gpu></pci>
<pci busid="0000:02:00.0"><gpu dev="1" sm="90"><xgmi target="1" count="2"/></gpu></pci>
<pci busid="0000:03:00.0"><nic><net name="mlx5_0" dev="0" speed="400000" port="1"/></nic></pci>
</pci></cpu></system>
"""
IBNETDISCOVER = b"""#
Switch\t41 "S-c0"\t\t# "MF0;top:MQM8700/U1" enhanced port 0 lid 3 lmc 0
[1]\t"S-a1"[8]\t\t# "MF0;leaf1:MQM8700/U1" lid 5 4xHDR
[2]\t"S-a1"[9]\t\t# "MF0;leaf1:MQM8700/U1" lid 5 4xHDR

Switch\t41 "S-a1"\t\t# "MF0;leaf1:MQM8700/U1" enhanced port 0 lid 3 lmc 0
[1]\t"H-f11"[1](f11) \t\t# "node1 mlx5_1" lid 4 4xNDR
[2]\t"H-f21"[1](f21) \t\t# "node2 mlx5_1" lid 4 4xNDR
[8]\t"S-c0"[1]\t\t# "MF0;top:MQM8700/U1" lid 9 4xHDR
[9]\t"S-c0"[2]\t\t# "MF0;top:MQM8700/U1" lid 9 4xHDR

Ca\t1 "H-f11"\t\t# "node1 mlx5_1"
[1](f11) \t"S-a1"[1]\t\t# lid 4 lmc 0 "MF0;leaf1" lid 3 4xNDR

Ca\t1 "H-f21"\t\t# "node2 mlx5_1"
[1](f21) \t"S-a1"[2]\t\t# lid 4 lmc 0 "MF0;leaf1" lid 3 4xNDR
"""
NCCL_LOG = b"".join(
    b"node%d:%d:7 [0] NCCL INFO comm 0x5%d rank %d nranks 2 cudaDev 0 commId 0xabc - Init START\n"
    b"node%d:%d:7 [0] NCCL INFO Channel 00/02 :    0   1\n"
    b"node%d:%d:7 [0] NCCL INFO Ring 00 : %d -> %d -> %d\n"
    b"node%d:%d:7 [0] NCCL INFO Trees [0] -1/-1/-1->%d->%d\n"
    b"node%d:%d:7 [0] NCCL INFO comm 0x5%d rank %d nranks 2 cudaDev 0 commId 0xabc - Init COMPLETE\n"
    % (
        *(at, 100, at, at, at, 100, at, 100, 1 - at, at, 1 - at, at, 100, at, -1 if at == 0 else 0),
        *(at, 100, at, at),
    )
    for at in range(2)
)
DEEP_FABRICS = {
    "toml": (
        b"a." * DEEP + b"a=1",
        b"[" + b"a." * DEEP + b"a]",
        b"x = " + b"[" * DEEP + b"]" * DEEP,
        b"x = " + b"{a = " * DEEP + b"1" + b"}" * DEEP,
        b"x = {" + b"a." * DEEP + b"a = 1}",
        b'"a".' * DEEP + b"a = 1",
        b"[[hosts]]\n" * DEEP,
        b"[[hosts]]\nnames = '" + b"n[1-10]" * 12 + b"'\n",
        b"[[hosts]]\nnames = 'n'\n" + b"".join(b"a%d.b = 1\n" % at for at in range(DEEP)),
        b"[[hosts]]\nnames='n[1-1000000]'\ngpus=1\nnics=0\n" + b"[[links]]\nfrom='n'\nto='n'\n" * 9,
        b"x = '''" + b"'" * 2 + b"\\\n" * DEEP,
        b"".join(b"[[hosts]]\nnames='%x-[1-1000000]'\ngpus=0\nnics=0\n" % at for at in range(99)),
        b"[[hosts]]\nnames='n'\n"
        + b"".join(b"[[switches]]\nnames='%x[1-999999]'\n" % at for at in range(99)),
        b"[[hosts]]\nnames='n[" + b"1-999999," * 99 + b"1]'\n",
        b"[[hosts]]\nnames='" + b"n[1-999999]," * 99 + b"n'\n",
        b"d = 9999-99-99T99:99:99Z\n",
    ),
    "xml": (
        b"<system>" * DEEP,
        b"<system>" + b"<pci>" * DEEP + b"</pci>" * DEEP + b"</system>",
        b"<system><cpu><pci><gpu dev='0'/></pci></cpu></system>",
        b"<system><cpu>" + b"<pci><gpu dev='0' sm='90'/></pci>" * 900 + b"<net/>" * 900 + b"</cpu></system>",
        b"<system><cpu><gpu " + b" ".join(b"a%d='1'" % at for at in range(DEEP)) + b"/></cpu></system>",
        b'<!DOCTYPE s [<!ENTITY a "x"><!ENTITY b "&a;&a;&a;"><!ENTITY c "&b;&b;">]><system>&c;</system>',
        b'<!DOCTYPE s [<!ENTITY a SYSTEM "/dev/zero">]><system>&a;</system>',
        b'<!DOCTYPE s [<!ENTITY a "' + b"x" * 9999 + b'">]><system a="' + b"&a;" * 30_000 + b'"/>',
        b"<?xml version='1.0' encoding='utf-7'?><system/>",
        XML.replace(b"gfx942", b"gfx" + b"9" * 5000),
    ),
    "ibnetdiscover": (
        IBNETDISCOVER.replace(b"4xHDR", b"9" * 5000 + b"xHDR"),
        IBNETDISCOVER.replace(b"4xHDR", b"999xHDR"),
        IBNETDISCOVER.replace(b"[1]", b"[" + b"9" * 5000 + b"]"),
        IBNETDISCOVER.replace(b"mlx5_1", b"mlx" + b"9" * 5000),
        IBNETDISCOVER.replace(b"node1", b"n" * 100_000),
        IBNETDISCOVER.replace(b"[8]", b"[8][ext 9](" + b"a" * 100_000),
        IBNETDISCOVER + b'[1]\t"' * 100_000,
        b"".join(b'Switch 2 "S-%x" # "s"\n[1] "S-%x"[2] # "s" 4xHDR\n' % (at, at + 1) for at in range(9999)),
        IBNETDISCOVER.replace(b"4xHDR", b"4xHDR" + b" 4x" * 50_000),
        IBNETDISCOVER.replace(b"4xHDR", b"4xHDR" + b" " * 500_000 + b"x"),
        b"Switch" + b" " * 500_000 + b"x\n",
    ),
    "slurm": (
        b"SwitchName=s0 Nodes=n\n"
        + b"".join(b"SwitchName=s%d Switches=s%d\n" % (at + 1, at) for at in range(9999)),
        b"SwitchName=s Nodes=n[1-" + b"9" * 5000 + b"]",
        b"SwitchName=s Nodes=" + b"n[1-10]" * 12,
        b"SwitchName=s Nodes=" + b"n," * 500_000,
        b"SwitchName=s \\\n" * DEEP,
        b"a=" * 500_000,
        b"SwitchName=s " + b"a" * 500_000,
        b"SwitchName=s a" + b" " * 500_000 + b"b",
        b"SwitchName=s Nodes=" + b"[" * DEEP,
    ),
    "nccl": (
        b"n:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 999999 commId 0x1 - Init COMPLETE\n" * 99,
        b"n:1:1 [0] NCCL INFO Channel 00/999999999 :" + b" 0" * DEEP + b"\n",
        b"n:1:1 [0] NCCL INFO Ring 999999999 : 0 -> 1 -> 2\n" * 99,
        b"n:1:1 [0] NCCL INFO Trees " + b"[0] -1/-1/-1->0->1 " * DEEP,
        b"NCCL INFO " * 500_000,
        b"a" * 500_000 + b" NCCL INFO",
        b"n:1:1 [0] NCCL INFO " + b"comm 0x1 rank 0 nranks 2 " * 50_000,
        b"n:1:1 [0] NCCL INFO Channel 00/02 :" + b" " * 500_000 + b"x",
        b"n:1:1 [0] NCCL INFO comm 0x1 rank 0 nranks 2 " + b"commId 0x1 " * DEEP,
    ),
    "paths": (b'{"paths":' + b"[" * DEEP, b'{"version":' + b"9" * 5000 + b"}", b'{"paths":[' + b"{}," * DEEP),
}  # fmt: skip
FABRICS = {
    "toml": (as_toml(fat_tree(SIZE)).encode(), as_toml(rail_optimised(FabricSize(4, 2, 2, 8))).encode()),
    "xml": (XML,),
    "ibnetdiscover": (IBNETDISCOVER,),
    "slurm": (SLURM,),
    "nccl": (NCCL_LOG,),
    "paths": (encode(PathsFile(paths=on_cable((0, 1)))),),
}


def of_a_fabric(random: Random, number: int, folder: Path) -> Commands:
    """A description of a fabric or of a host, changed, and a run whose fabric it is to be."""
    kind = list(FABRICS)[number % len(FABRICS)]
    if number // len(FABRICS) % 4 == 3:
        content = random.choice(DEEP_FABRICS[kind])
    else:
        content = changed(random, random.choice(FABRICS[kind]))
    given, run = folder / f"given.{kind}", str(copied(in_a_fabric(folder.parent), folder / "run"))
    given.write_bytes(content)
    file, inside, switches = str(given), folder / "good.xml", folder / "good.conf"
    inside.write_bytes(XML)
    switches.write_bytes(SLURM)
    slurm = ["topology", "--slurm", file, "--gbit", "400"]
    asked = {
        "toml": (
            [["topology", file]],
            [["topology", file, "--attach", run], ["topology", run]],
            [["topology", file, "--inside", str(inside), "--json"]],
        ),
        "xml": (
            [["topology", "--fat-tree", "4", "--inside", file]],
            [["topology", "--rail-optimised", "4", "--inside", file, "--json"]],
            [["topology", "--slurm", str(switches), "--gbit", "4", "--inside", file]],
        ),
        "ibnetdiscover": (
            [["topology", "--ibnetdiscover", file]],
            [["topology", "--ibnetdiscover", file, "--gbit", "400", "-o", str(folder / "made.toml")]],
        ),
        "slurm": ([slurm], [[*slurm, "--nics", "2", "--json"]]),
        "nccl": ([["topology", run, "--nccl-log", file]],),
        "paths": (
            [["topology", run, "--paths", file], ["topology", run]],
            [["topology", run, "--plan", str(folder / "plan.json"), "--probes", file]],
        ),
    }
    return random.choice(asked[kind])
