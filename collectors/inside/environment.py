"""Which environment variables are recorded: settings of the job, and no secrets.

Takes an environment; returns the variables on a short list. All others are never read into a file; listed
ones with the name of a secret are left out, and values are masked. Runs inside the job, where only the
standard library may be assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["LONGEST", "MASK", "kept", "mask", "masked_command"]

LONGEST = 300  # characters of a value that are kept

_KEPT = re.compile(
    r"(CUBLAS|CUDA|CUDNN|FI|GLOO|GOMP|HIP|HSA|KINETO|KMP|MIOPEN|MKL|NCCL|NVIDIA|NVTE|OMP|OPENBLAS|PYTORCH|RCCL"
    r"|ROCR|TORCH|TORCHDYNAMO|TORCHELASTIC|TORCHINDUCTOR|TORCHRUN|TRITON|UCX)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|STEP_NUM_TASKS|STEP_NUM_NODES|NTASKS|NNODES|RESTART_COUNT)"
    r"|(RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|LD_PRELOAD|PYTHONHASHSEED|TEARDOWN_CUPTI)"
)


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded variables in order of their names, their values masked and shortened."""
    return {
        name: mask(value)[:LONGEST]
        for name, value in sorted(environment.items())
        if _KEPT.fullmatch(name) and not is_secret(name)
    }


# Text without secrets, which show by their names, their places in URLs, and their shapes.

MASK = "***"

_ENDS = (
    "token|secret|password|passwd|passphrase|passcode|pwd|credential|cred|cookie|auth|authorization|bearer|jwt"
    "|apikey|accesskey|secretkey|privatekey|authkey|accountkey|sharedaccesskey|signature"
)
_ENDS_SO = re.compile(rf"(?:{_ENDS})s?")
_HAS = re.compile(
    r"secret|passw(?:or)?d|passphrase|credential|(?:api|access|private|auth|signing)[-_]?(?:key|token)"
)
_WORDS = frozenset({"pass", "passes", "pw", "key", "keys"})  # last words of a secret's name, unless after
# one of these: parts of a model, a schedule or a tokenizer, which are not secrets.
_HARMLESS = re.compile(
    r"additional|band|backward|batch|bos|by|cls|dry|end|eos|eval|first|foreign|forward|group|high"
    r"|image|input|label|last|local|low|mask|max|min|multi|n|new|next|num|one|output|pad|per"
    r"|primary|prompt|second|sep|single|sort|special|start|state|stop|target|total|train|two|unk"
    r"|vocab"
)
_PARTS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_LONGEST_NAME = 200

_NAMED = re.compile(r"(?<![\w.-])([\w.-]+)(\\?[\"']?\s{0,3}[=:]\s{0,3}|[ \t]{1,3})(\\?[\"'])?")
_SCHEME = r"(?:(?:bearer|basic|digest|negotiate|token)[ \t]{1,3})?"
_BARE = re.compile(rf"{_SCHEME}[^\s\"'&]+", re.IGNORECASE)
_HEADER = re.compile(r"(?:proxy-)?authorization|(?:set-)?cookie", re.IGNORECASE)
_IS_BEARER = re.compile(r"bearer", re.IGNORECASE)
_IS_SETTING = re.compile(
    r"true|false|none|null|yes|no|on|off|\$\w*|\$\{\w*\}|<\w*>|\*\*\*|[-+]?[\d._]{1,12}(?:e[-+]?\d+)?[kmgb]?",
    re.IGNORECASE,
)

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = "-----END"
_IN_URL = re.compile(r"(?<=\w://)[^\s/\"'<>]*@")
_IN_QUERY = re.compile(
    r"([?&;](?:sig|signature|x-amz-(?:signature|security-token|credential)|x-goog-(?:signature|credential)|se?cret"
    r"|code|key|auth)=)[^\s\"'&;#]+",
    re.IGNORECASE,
)
_HOOK = re.compile(
    r"(https?://(?:hooks\.[\w.-]{1,200}|[\w.-]{1,200}\.(?:webhook\.office|logic\.azure|powerplatform)\.com(?::\d{1,5})?"
    r"|[^\s/\"'?#]{1,200}/(?:[\w.%~-]{1,64}/){0,6}(?:web)?hooks?[\w.-]{0,32})/)[^\s\"'*][^\s\"']*",
    re.IGNORECASE,
)
_PAIR = r"(?!\d{1,9}:\d{1,9}(?![^\s\"']))[^\s\"':/@=(,-][^\s\"':/@=(,]{0,99}:"
_BEFORE_HOST = re.compile(rf"(?<![^\s\"'=(,]){_PAIR}[^\s\"'/@]{{1,200}}@(?=[\w.-])(?!sha\d)")
_LOGIN_OF = re.compile(rf"(?<![^\s\"'])((?:-[uU]|--(?:proxy-)?user)(?:=|[ \t]{{0,3}})[\"']?){_PAIR}[^\s\"']+")
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    + "|".join(
        [
            r"gh[a-z]_[A-Za-z0-9]{16,}", r"github_pat_\w{16,}", r"gl[a-z]{1,6}-[\w-]{16,}",  # GitHub, GitLab
            r"(?:hf|api_org|npm|r8|gsk|rpa|ntn|wandb_v\d)_[A-Za-z0-9_]{16,}", r"nvapi-[\w-]{16,}",
            r"sk-(?=[\w-]{0,80}\d)[\w-]{16,}", r"sk-[A-Za-z]{20,}", r"[spr]k_(?:live|test)_\w{10,}",
            r"xai-[A-Za-z0-9]{20,}", r"pplx-[A-Za-z0-9]{20,}", r"dapi[0-9a-f]{32}", r"lin_api_\w{16,}",
            r"AIza[\w-]{20,}", r"ya29\.[\w-]{10,}", r"GOCSPX-[\w-]{16,}", r"1//0[\w-]{20,}",  # Google
            r"(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}", r"dckr_[a-z]{3}_[\w-]{16,}", r"pypi-Ag[\w-]{16,}",
            r"xox[a-z]-[\w-]{10,}", r"xapp-[\w-]{10,}", r"eyJ[\w-]{16,}(?:\.[\w-]*){0,4}",  # Slack, JWT
            r"SG\.[\w-]{16,}(?:\.[\w-]*)?", r"(?:AC|SK)[0-9a-f]{32}", r"[0-9a-f]{32}-us\d{1,2}",
            r"sq0[a-z]{3}-[\w-]{20,}", r"\d{8,10}:AA[\w-]{30,}", r"[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,}",
            r"AKCp[A-Za-z0-9]{10,}", r"hv[sbr]\.[\w-]{16,}", r"shp[a-z]{2}_\w{16,}", r"do[opr]_v1_\w{16,}",
            r"tskey-[\w-]{16,}", r"AGE-SECRET-KEY-1\w{16,}",
        ]
    )
    + ")"
)  # fmt: skip
_HEX_KEY = re.compile(r"[0-9a-f]{32}|[0-9a-f]{40}")
_LOGS_IN = re.compile(r"(\blogin[ \t]{1,3}(?:--?[\w-]{1,30}[ \t]{1,3}){0,3})(?:[0-9a-f]{40}|[0-9a-f]{32})\b")
_SHELL = re.compile(r"-\w*c")


def is_secret(name: str) -> bool:
    """Return whether a variable, an option or a key of this name is a secret."""
    if len(name) > _LONGEST_NAME:
        name = name[-_LONGEST_NAME:]
    parts = [part.lower() for part in _PARTS.findall(name)]
    last, before = (parts or [""])[-1], (parts[-2] if parts[1:] else "")
    if _HARMLESS.fullmatch(before) and last in {*_WORDS, "token", "tokens"}:
        return False
    if last in _WORDS or _ENDS_SO.fullmatch("".join(parts[-2:])) or _ENDS_SO.fullmatch(last):
        return True
    lowered = name.lower()
    ends = any(
        last.endswith(end) for end in ("token", "secret", "password", "passwd", "pwd", "apikey", "sshpass")
    )
    return ends or _HAS.search(lowered) is not None


def mask(text: str) -> str:
    """Return a text with everything masked that looks like a secret."""
    text = "".join(_without_private_keys(text))
    text = _HOOK.sub(rf"\1{MASK}", text)
    text = _IN_URL.sub(f"{MASK}@", text)
    text = _IN_QUERY.sub(rf"\1{MASK}", text)
    text = _LOGIN_OF.sub(rf"\1{MASK}", text)
    text = _BEFORE_HOST.sub(f"{MASK}@", text)
    text = "".join(_without_named(text))
    return _LOGS_IN.sub(rf"\1{MASK}", _SHAPES.sub(MASK, text))


def masked_command(words: Iterable[str]) -> list[str]:
    """Return a command's words, masked: `--api-key X`, `--token=X`, `env HF_TOKEN=X`, passwords in URLs."""
    masked: list[str] = []
    before, logs_in = "", False
    for word in words:
        name, equals, _ = word.partition("=")
        if _is_value_of(before, word, logs_in):
            masked.append(MASK)
        elif equals and re.fullmatch(r"[\w.-]+", name) and not _SHELL.fullmatch(before):
            masked.append(_masked_assignment(name, word))
        else:
            masked.append(mask(word))
        before, logs_in = word, logs_in or word == "login" or word.endswith("sshpass")
    return masked


def _is_value_of(before: str, word: str, logs_in: bool) -> bool:
    """Return whether a word is the secret value of the option before it."""
    if word.startswith("-") or not word:
        return False
    if logs_in and (before == "-p" or _HEX_KEY.fullmatch(word)):
        return True
    if before in ("-u", "-U", "--user", "--proxy-user"):
        return re.match(_PAIR, word) is not None
    return (
        before.startswith("-") and "=" not in before and is_secret(before) and not _IS_SETTING.fullmatch(word)
    )


def _masked_assignment(name: str, word: str) -> str:
    """Mask a word `NAME=VALUE`, whose value extends to the end of the word, blanks included."""
    value = word[len(name) + 1 :].strip("\"'")
    if is_secret(name) and value and not _is_setting(name, value):
        return f"{name}={MASK}"
    return mask(word)


def _without_private_keys(text: str) -> Iterator[str]:
    end = 0
    while header := _PRIVATE_KEY.search(text, end):
        yield text[end : header.start()] + MASK
        closed = text.find(_KEY_ENDS, header.end())
        close = text.find("-----", closed + len(_KEY_ENDS)) if closed >= 0 else -1
        end = close + 5 if close >= 0 else len(text)
    yield text[end:]


def _without_named(text: str) -> Iterator[str]:
    """Yield the parts of a text, with values masked after names that imply a secret."""
    end = 0
    while match := _NAMED.search(text, end):
        name, separator, quote = match.groups()
        begin = match.end()
        yield text[end : match.end(2)]
        end = match.end(2)
        asks = not separator.isspace() or name.startswith("-") or _IS_BEARER.fullmatch(name)
        if not asks or not is_secret(name):
            continue
        stop = _end_of_value(text, begin, quote or "", _HEADER.fullmatch(name) and ":" in separator)
        value = text[begin:stop]
        if value and not _is_setting(name, value) and not (separator.isspace() and value.startswith("-")):
            yield (quote or "") + MASK
            end = stop
    yield text[end:]


def _end_of_value(text: str, begin: int, quote: str, is_header: object) -> int:
    if quote:
        stop = text.find(quote, begin)
        return stop if stop >= 0 else len(text)
    if is_header:
        return next((end for end in range(begin, len(text)) if text[end] in "\"'\n"), len(text))
    bare = _BARE.match(text, begin)
    return bare.end() if bare else begin


def _is_setting(name: str, value: str) -> bool:
    """Return whether a value cannot be a secret: a switch, a count of tokens, the current folder."""
    return _IS_SETTING.fullmatch(value) is not None or (
        name.lower().endswith("pwd") and value.startswith("/")
    )
