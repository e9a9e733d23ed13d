"""Environment of a measurement: the machine, its GPU and the versions of packages."""

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
    """Return the time in UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def package_version(name: str) -> str | None:
    """Return the version of an installed package, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of this checkout.

    The environment variable COMMIT names it on machines without the git folder.
    """
    if name := os.environ.get("COMMIT"):
        return name
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        completed = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return completed.stdout.strip()


def environment(kind: str, gpu: str = "") -> dict[str, Any]:
    """Return the fields of ``Record`` that the records of a run share.

    Args:
        kind: One of ``records.KINDS``.
        gpu: Name of the emulated GPU.
    """
    packages = {"torch": "torch", "dsl": "nvidia-cutlass-dsl"}
    installed = {name: package_version(package) for name, package in packages.items()}
    versions = {name: version for name, version in installed.items() if version}
    versions["python"] = platform.python_version()
    if kind == "gpu":
        versions["cuda"] = str(torch.version.cuda)
    gpu_fields = _gpu() if kind == "gpu" else {"gpu": gpu}
    return {
        "machine": _processor(),
        "commit": commit(),
        "time": now(),
        "versions": versions,
        **gpu_fields,
    }


def gpu_uuid() -> str:
    """Return the UUID of the GPU in use, by which NVML knows it.

    The index does not do: torch may see other GPUs, or the same ones in another order.
    """
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _gpu() -> dict[str, Any]:
    """Return the fields of ``Record`` about the GPU, as ``nvidia-smi`` gives them."""
    command = ["nvidia-smi", f"--id={gpu_uuid()}", f"--query-gpu={_QUERY}"]
    command.append("--format=csv,noheader,nounits")
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, driver, *numbers = (cell.strip() for cell in line.split(","))
    # The clock of the SMs changes under load, that of the memory does not.
    _, memory, max_sm, limit = (float(x) if re.fullmatch(r"[\d.]+", x) else 0.0 for x in numbers)
    return {
        "gpu": name,
        "driver": driver,
        "clocks": {"memory": memory, "sm max": max_sm},
        "power": {"limit": limit},
    }


@functools.cache
def _processor() -> str:
    """Return the name of the processor, and the CPUs and threads of this process."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else None
    name = match.group(1).strip() if match else platform.processor() or platform.machine()
    return f"{name}, {cpus} CPUs, {torch.get_num_threads()} threads"
