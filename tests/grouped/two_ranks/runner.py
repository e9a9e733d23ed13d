"""Starts two processes, runs checks in them, and collects the results of each rank."""

import datetime
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

#: The checks of each subject, by the module and by the function's name.
CHECKS: dict[str, dict[str, Callable[[], None]]] = {}


class World:
    """The group of two processes, as seen by one of them.

    Attributes:
        rank: 0 or 1.
        folder: Directory that both processes share.
        mesh: Mesh of both ranks, with one dimension.
        results: The traceback of each check that has run, or "" if it passed.
    """

    rank: int = 0
    folder: Path = Path()
    mesh: DeviceMesh
    results: dict[str, str] = {}


world = World()


def check(function):
    """Register a check under the name of its module."""
    CHECKS.setdefault(function.__module__.rsplit(".", 1)[-1], {})[function.__name__] = function
    return function


def load_checks(subjects):
    """Import the modules of ``subjects`` and return their checks by name, in order."""
    for subject in subjects:
        importlib.import_module(f"{__package__}.{subject}")
    checks = [item for subject in subjects for item in CHECKS[subject].items()]
    assert len(dict(checks)) == len(checks), "two checks have one name"
    return dict(checks)


def launch(subjects, folder):
    """Run the checks of ``subjects`` in two processes; their results are written to ``folder``."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", __package__]
    python_path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder), ",".join(subjects)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
    return folder


def assert_passed(folder, name):
    """Fail with the traceback of the check ``name`` if it failed on a rank."""
    for rank in range(2):
        error = json.loads((folder / f"{rank}.json").read_text())[name]
        assert not error, error


def write_results(results):
    (world.folder / f"{world.rank}.json").write_text(json.dumps(results))


def leave():
    """End this process during a check, and count the check as passed."""
    checks = {name: "" for subject in CHECKS.values() for name in subject}
    write_results(checks | world.results)
    os._exit(0)


def main():
    """Run the checks that the command line names, or all checks of its subjects."""
    rank, folder, subjects, *names = sys.argv[1:]
    world.rank, world.folder = int(rank), Path(folder)
    torch.set_num_threads(1)
    checks = load_checks(subjects.split(","))
    store = dist.FileStore(str(world.folder / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    world.mesh = init_device_mesh("cpu", (2,))
    for name in names or checks:
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            checks[name]()
            world.results[name] = ""
        except Exception:
            world.results[name] = traceback.format_exc()
        seconds = time.perf_counter() - start
        print(world.rank, name, f"{seconds:.2f} s", world.results[name], flush=True)
        write_results(world.results)
    dist.destroy_process_group()
