"""Accesses to memory that the process does not have end a launch with an error, not the process."""

import mmap
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ptx_emulator as emulator
from tests.helpers import run_python

from .ptx import fails, run

#: Addresses that no process has: of the last page of user space, of none, and of the kernel.
WILD = [0x7FFF_FFFF_F000, 0x0123_4567_89AB_CDE0, 0x0F00_0000_0000_0000]
NAMED = r"\n  in kernel kernel\n  CTA \(0,0,0\) warp 0, PTX line \d+: "
LOAD = "ld.global.b32 %r0, [%p0];"


def _run(body, address, **options):
    """Run ``body`` with an address in %d0, and a real array in %p1."""
    body = f"mov.b64 %d1, {address}; {body}"
    run(body.replace("%p0", "%d1"), np.zeros(4, np.uint32), **options)


def _works():
    x = np.zeros(1, np.uint32)
    run("st.global.b32 [%p0], 7;", x)
    return x[0] == 7


@pytest.mark.parametrize("address", WILD, ids=hex)
@pytest.mark.parametrize(
    ("body", "access"),
    [
        (LOAD, "global load"),
        ("ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%p0];", "global load"),
        ("st.global.b32 [%p0], %t;", "global store"),
        ("ld.b64 %d2, [%p0];", "global load"),
        ("red.global.add.u32 [%p0], 1;", "global store"),
    ],
    ids=["load", "vector", "store", "generic", "atomic"],
)
def test_a_wild_pointer_is_an_error_that_names_its_place(body, access, address):
    for _ in range(2):
        with fails(rf"{access} at an invalid address: {address:#x}[^\n]*{NAMED}"):
            _run(body, address)
    assert _works()


@pytest.mark.parametrize("mode", ["eager", "chaos"])
@pytest.mark.parametrize(
    ("copy", "kind"),
    [
        ("cp.async.ca.shared.global [%r0], [%p0], 16; cp.async.wait_all;", "cp.async"),
        (
            "cp.async.bulk.global.shared::cta.bulk_group [%p0], [%r0], 16;"
            "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
            "bulk store",
        ),
    ],
    ids=["cp.async", "bulk"],
)
def test_a_wild_copy_is_an_error(copy, kind, mode):
    body = f".shared .align 16 .b8 s[16]; mov.u32 %r0, s; {copy}"
    with (
        emulator.options(mode=mode, seed=1, check_fences=False),
        fails(f"{kind} at an invalid address"),
    ):
        _run(body, WILD[0])
    assert _works()


def test_a_store_to_read_only_memory_is_an_error():
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) as page:
        x = np.frombuffer(page, np.uint32)
        run("ld.global.b32 %r0, [%p0];", x)
        with fails("global store at an invalid address"):
            run("st.global.b32 [%p0], %t;", x)
        del x
    assert _works()


def test_a_wild_pointer_in_a_worker_thread_is_an_error():
    """Check that a launch of a worker thread fails, and later launches of both threads succeed."""

    def work():
        for address in WILD:
            with fails("global load at an invalid address"):
                _run(LOAD, address)
        return _works()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(work).result()
    assert _works()


@pytest.mark.parametrize("enable", ["", "import faulthandler; faulthandler.enable()"])
def test_faults_of_other_code_still_end_the_process(enable):
    """Check that a failed launch leaves the handlers as they were."""
    code = f"""
import ctypes, os
import ptx_emulator as emulator
{enable}
emulator.load_ptx('''.version 8.8
.target sm_100a
.visible .entry k() {{ .reg .b64 %d; .reg .b32 %r; mov.b64 %d, {WILD[0]};
ld.global.b32 %r, [%d]; ret; }}''')
try:
    emulator.launch("k", (1,), (32,))
except emulator.EmulatorError:
    pid = os.fork()
    if not pid:
        os.close(2)
        ctypes.string_at({WILD[0]})
    print(os.WTERMSIG(os.waitpid(pid, 0)[1]))
"""
    assert int(run_python(code)) == signal.SIGSEGV
