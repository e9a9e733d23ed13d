"""What a measurement depends on beside the code: the machine, its GPU and the versions."""

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of this checkout; the environment variable COMMIT names it where git cannot."""
    if given := os.environ.get("COMMIT"):
        return given
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def environment(kind: str, gpu: str = "") -> dict[str, Any]:
    """What holds now, of measurements of one of ``records.KINDS``: fields of ``Record`` that those
    of a run share.
    """
    names = {"torch": "torch", "dsl": "nvidia-cutlass-dsl"}
    found = {name: package_version(package) for name, package in names.items()}
    versions = {name: version for name, version in found.items() if version}
    versions["python"] = platform.python_version()
    if kind == "gpu":
        versions["cuda"] = str(torch.version.cuda)
    of_gpu = _gpu() if kind == "gpu" else {"gpu": gpu}
    return {
        "machine": _processor(),
        "commit": commit(),
        "time": now(),
        "versions": versions,
        **of_gpu,
    }


def gpu_uuid() -> str:
    """The GPU in use as NVML knows it: torch may count others, or in another order."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _gpu() -> dict[str, Any]:
    command = ["nvidia-smi", f"--id={gpu_uuid()}", f"--query-gpu={_QUERY}"]
    command.append("--format=csv,noheader,nounits")
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, driver, *numbers = (cell.strip() for cell in line.split(","))
    # The memory's clock does not change under load, the multiprocessors' does.
    _, memory, most, limit = (float(x) if re.fullmatch(r"[\d.]+", x) else 0.0 for x in numbers)
    return {
        "gpu": name,
        "driver": driver,
        "clocks": {"memory": memory, "sm max": most},
        "power": {"limit": limit},
    }


@functools.cache
def _processor() -> str:
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    name = found.group(1).strip() if found else platform.processor() or platform.machine()
    return f"{name}, {cpus} CPUs, {torch.get_num_threads()} threads"
