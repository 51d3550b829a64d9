"""``hicache-ext doctor``: can this machine, this SGLang and this model be served? Starts no server."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache_ext.core import kv_spec, model_kv
from hicache_ext.core.model_kv import ModelConfigError, ModelKV
from hicache_ext.integration.settings import GB
from hicache_ext.integration.sizing import least_gb

if TYPE_CHECKING:
    _SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

PYTHONS = ((3, 11), (3, 12))

# Their rows are not what the head counts in config.json say.
_UNSIZED = {"compressed", "quantized"}


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``cure`` is empty if nothing is to be done."""

    check: str
    level: Level
    text: str
    cure: str = ""


def add_parser(subparsers: _SubParsers) -> None:
    """Add ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, SGLang and a model before a server is started",
        description="Checks Python, SGLang and its patches, torch and the GPU, memory and, with --model, "
        "whether the KV of that model is carried and how much of it the host holds. Nothing is changed, and "
        "no server is started. Exits with 0 if all is well, 1 on a problem, 2 on a usage error.",
    )
    parser.add_argument(
        "--model", type=Path, metavar="PATH", help="local folder of the model; its weights are not read"
    )
    parser.add_argument(
        "--page-size",
        type=_page_size,
        default=1,
        metavar="N",
        help="tokens a page, as the server's --page-size; a power of two (default: 1, SGLang's own)",
    )
    parser.add_argument(
        "--host-gb",
        type=_gigabytes,
        metavar="G",
        help="host memory in GB (10^9 bytes) that you want to give with --hicache-ext-host-gb",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; 1 if it holds a problem."""
    wait = Console(stderr=True).status("checking") if sys.stderr.isatty() else nullcontext()
    with wait:
        findings = [*_environment(), *_memory(arguments.host_gb)]
        model, facts = None, {}
        if arguments.model is not None:
            model, lines = _model(arguments.model.expanduser(), arguments.page_size)
            findings += lines
        if model is not None and model.token_bytes and not _UNSIZED & set(model.kinds):
            facts = _sizes(model, arguments.page_size, arguments.host_gb)
            if facts["tokens"] < arguments.page_size:
                findings.append(_too_small(arguments.host_gb, facts))
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if arguments.json:
        report = {
            "ok": not problems,
            "findings": [asdict(finding) for finding in findings],
            "model": {**asdict(model), **facts} if model is not None else None,
        }
        print(json.dumps(report, indent=2))
    else:
        _print(findings, facts, problems)
    return 1 if problems else 0


def _page_size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text} is not a power of two from 1; 1, 16 and 64 are usual")
    return value


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of GB")
    return value


def _environment() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] in PYTHONS:
        yield Finding("Python", Level.OK, version)
    else:
        yield Finding("Python", Level.PROBLEM, f"{version} is not supported", "use Python 3.11 or 3.12")
    yield _sglang()
    yield from _device()


def _sglang() -> Finding:
    from hicache_ext import patching

    try:
        install = patching.find_sglang()
        status = patching.state(install)
    except patching.PatchError as error:
        return Finding(
            "SGLang", Level.PROBLEM, str(error), "install a supported SGLang, then `hicache-ext patch apply`"
        )
    if status.state == "patched":
        return Finding("SGLang", Level.OK, f"{install.version}, patched")
    cure = {
        "pristine": "run `hicache-ext patch apply`",
        "partial": "run `hicache-ext patch apply` to complete it",
        "foreign": "reinstall SGLang, then run `hicache-ext patch apply`",
        "unsupported": f"install one of: {', '.join(patching.supported_versions())}",
    }[status.state]
    return Finding("SGLang", Level.PROBLEM, f"{install.version}: {status.reason}", cure)


def _device() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        yield Finding(
            "torch", Level.PROBLEM, f"cannot be imported: {reason}", "reinstall SGLang, which brings torch"
        )
        return
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        yield Finding(
            "torch", Level.OK, f"{torch.__version__}, {torch.cuda.device_count()} x {', '.join(names)}"
        )
        yield _lockable()
        return
    from hicache_ext.integration.cpu_platform import PLATFORM_NAME

    if os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME:
        yield Finding("torch", Level.OK, f"{torch.__version__}, CPU through the platform {PLATFORM_NAME}")
    else:
        yield Finding(
            "torch",
            Level.WARNING,
            f"{torch.__version__} sees no GPU",
            f"to serve on the CPU, set SGLANG_PLATFORM={PLATFORM_NAME} and give --device cpu "
            "--attention-backend torch_native --disable-cuda-graph; else check the driver with `nvidia-smi`",
        )


def _lockable() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("lockable memory", Level.OK, "unlimited")
    return Finding(
        "lockable memory",
        Level.WARNING,
        f"{limit / GB:.3f} GB (ulimit -l); CUDA pins through its driver, but RDMA transfers count against it",
        "for RDMA, run `ulimit -l unlimited` before the server, or raise its memlock",
    )


def _memory(host_gb: float | None) -> Iterator[Finding]:
    import psutil

    from hicache_ext.integration.flags import check_host_memory, memory_limit
    from hicache_ext.integration.settings import Settings, SettingsError

    memory = psutil.virtual_memory()
    text = f"{memory.available / GB:.1f} GB free of {memory_limit() / GB:.1f} GB"
    try:
        check_host_memory(Settings(host_gb=host_gb))
    except SettingsError as error:
        what, _, cure = str(error).partition("; ")
        if cure.startswith("ask"):
            yield Finding("memory", Level.PROBLEM, what, cure)
        else:
            yield Finding("memory", Level.PROBLEM, str(error), "ask for less, or use a larger machine")
        return
    if memory.available < 2 * GB:
        yield Finding("memory", Level.WARNING, text, "free memory first; the model needs some too")
    else:
        yield Finding("memory", Level.OK, text)


def _model(folder: Path, page_size: int) -> tuple[ModelKV | None, list[Finding]]:
    from hicache_ext.integration.model_kv import ProbeError, probe

    try:
        config = model_kv.read_config(folder)
        model = base = model_kv.from_config(config)
    except ModelConfigError as error:
        text, _, cure = str(error).partition("; ")
        return None, [
            Finding("model", Level.PROBLEM, text, cure or "name the folder of a Hugging Face model")
        ]
    findings = []
    doubt = ""
    try:
        model = probe(folder, base)
    except ProbeError as error:
        doubt = "judged by config.json alone"
        findings.append(
            Finding(
                "model",
                Level.WARNING,
                f"SGLang's own reading of the configuration failed ({error}); {doubt}",
                "the server decides when it starts; it may need --trust-remote-code or a newer SGLang",
            )
        )
    shape = f"{model.layers} attention layers, {model.rows}, {model.dtype}"
    findings.append(Finding("model", Level.OK, f"{model.architecture}: {shape}"))
    findings += [_structure(key, bool(doubt)) for key in model.kinds]
    if not doubt:
        findings += [
            _kept_whole(key)
            for key in base.kinds
            if _is_window(key) and not any(map(_is_window, model.kinds))
        ]
    if model.context is not None and page_size > model.context:
        findings.append(
            Finding(
                "page size",
                Level.PROBLEM,
                f"--page-size {page_size} is larger than the model's context of {model.context} tokens",
                "use a smaller page; 1, 16 and 64 are usual",
            )
        )
    return model, findings


def _is_window(key: str) -> bool:
    return key in ("sliding-window", "chunked-local")


def _structure(key: str, doubtful: bool) -> Finding:
    kind = kv_spec.kind_of(key)
    if kind.carried:
        return Finding("KV structure", Level.OK, f"{kind.title}: carried, a prefix is reused {kind.reuse}")
    if doubtful and _is_window(key):
        text = f"{kind.title}: carried only if SGLang keeps all tokens of all layers in one pool"
        return Finding(
            "KV structure", Level.WARNING, text, "start the server; it refuses with a reason if not"
        )
    text = f"{kind.title}: not carried, {kind.reason}; reusable {kind.reuse}"
    return Finding("KV structure", Level.PROBLEM, text, kind.cure)


def _kept_whole(key: str) -> Finding:
    kind = kv_spec.kind_of(key)
    text = f"{kind.title}: carried, because SGLang keeps all tokens of this model in one pool"
    return Finding("KV structure", Level.OK, text)


def _sizes(model: ModelKV, page_size: int, host_gb: float | None) -> dict[str, Any]:
    page_bytes = model.page_bytes(page_size)
    host_gb = 1.0 if host_gb is None else host_gb
    return {
        "token_bytes": model.token_bytes,
        "page_size": page_size,
        "page_bytes": page_bytes,
        "latent": "mla" in model.kinds,
        "carried": all(kv_spec.kind_of(key).carried for key in model.kinds),
        "host_gb": host_gb,
        "tokens": int(host_gb * GB) // page_bytes * page_size,
    }


def _too_small(host_gb: float | None, facts: dict[str, Any]) -> Finding:
    text = f"a page of {facts['page_bytes']} bytes does not fit into {facts['host_gb']:g} GB"
    cure = (
        "use a smaller page"
        if host_gb is None
        else f"give --host-gb at least {least_gb(facts['page_bytes']):.6f}"
    )
    return Finding("host memory", Level.PROBLEM, text, cure)


def _print(findings: list[Finding], facts: dict[str, Any], problems: int) -> None:
    console = Console(highlight=False)
    table = Table(show_lines=False)
    for heading in ("check", "result", "finding", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.level]
        table.add_row(
            finding.check, f"[{colour}]{finding.level}[/{colour}]", escape(finding.text), escape(finding.cure)
        )
    console.print(table)
    if facts:
        part = "" if facts["carried"] else " (main structure, not carried alone)"
        ranks = ", divided by the TP size: each rank stores the latent" if facts["latent"] else ""
        console.print(
            f"KV{part}: {facts['token_bytes']:,} bytes a token, {facts['page_bytes']:,} bytes a page of "
            f"{facts['page_size']} on the host; {facts['host_gb']:g} GB of host memory hold "
            f"{facts['tokens']:,} tokens{ranks}",
            soft_wrap=True,
        )
    verdict = f"{problems} problem{'s' if problems != 1 else ''} found" if problems else "no problem found"
    console.print(verdict)
