"""The engine: launches, options, counts, data races, threads, and the build of its library."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ptx_emulator as emulator
from ptx_emulator import compilation
from ptx_emulator.host import settings
from tests.helpers import DAMAGE, run_python

from .ptx import fails, outcome, run

ADD_ONE = """mul.wide.u32 %d0, %t, 4; add.u64 %d1, %p0, %d0; ld.global.b32 %r0, [%d1];
add.u32 %r0, %r0, %p1; st.global.b32 [%d1], %r0;"""
ROOT = Path(__file__).parents[2]


def test_pointers_and_integers_are_passed():
    x = np.zeros(32, np.uint32)
    run(ADD_ONE, x, 5)
    assert (x == 5).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros(32, np.uint32),), "2 parameters, got 1"),
        ((bytes(4), 1), "a parameter of 8 bytes got 4"),
    ],
    ids=["number", "size"],
)
def test_wrong_arguments_raise(arguments, message):
    run(ADD_ONE, np.zeros(32, np.uint32), 5)
    with pytest.raises(ValueError, match=message):
        emulator.launch("kernel", (1,), (32,), arguments)


def test_an_unknown_kernel_raises():
    with pytest.raises(KeyError):
        emulator.launch("no such kernel", (1,), (32,))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"block": 2048}, "block of 2048 threads"),
        ({"grid": 3, "cluster": 2}, "not divisible by the cluster"),
        ({"dynamic_smem": 300_000}, "the limit is 232448"),
    ],
)
def test_invalid_launches_fail(launch, message):
    with fails(message):
        run("", **launch)
    run("")  # the engine still works


def test_an_error_names_kernel_cta_warp_and_line():
    with fails(r"(?s)^trap.*in kernel broken.*CTA \(0,0,0\) warp 0.*trap$"):
        run("mov.u32 %r0, 1; trap;", name="broken", grid=3)


def test_only_watched_memory_may_be_touched():
    """Check that accesses outside of watched memory fail."""
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    emulator.watch(x)
    run(ADD_ONE, x, 1)
    with fails("global load out of bounds"):
        run(ADD_ONE, y, 1)
    with fails("124 of 128|bytes past the end"):
        run(ADD_ONE.replace("[%d1]", "[%d1+4]"), x, 1)
    emulator.watch(y)
    run(ADD_ONE, y, 1)
    emulator.unwatch()
    run(ADD_ONE, np.zeros(32, np.uint32), 1)


def test_misaligned_access_fails():
    with fails("misaligned 4-byte load"):
        run(ADD_ONE.replace("[%d1]", "[%d1+2]"), np.zeros(64, np.uint32), 1)


SHARED = ".shared .align 4 .b8 s[128]; mov.u32 %r0, s; ld.shared.b32 %r1, [%r0+{}];"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b64 %d0, 16; ld.global.b32 %r0, [%d0];", "null or tiny pointer"),
        (SHARED.format(128), "shared access out of bounds"),
        (SHARED.format(-4), "shared access out of bounds"),
    ],
)
def test_wrong_addresses_fail(body, message):
    run(SHARED.format(124))
    with fails(message):
        run(body)


def test_options_nest_and_end_with_their_block():
    def num_sms():
        return set(outcome("mov.u32 %r0, %nsmid;", "%r0").flat)

    with emulator.options(num_sms=7), emulator.options(mode="chaos", seed=1):
        assert num_sms() == {7}
    assert num_sms() == {emulator.engine.device_sms()}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"num_sms": 0}, "num_sms must be positive"),
    ],
    ids=["mode", "num_sms"],
)
def test_invalid_options_raise(option, message):
    with pytest.raises(ValueError, match=message), emulator.options(**option):
        pass


@pytest.mark.parametrize("option", ["races", "check_fences"])
def test_flags_are_true_or_false(option):
    with (
        pytest.raises(TypeError, match=f"{option} must be True or False, got 'yes'"),
        emulator.options(**{option: "yes"}),
    ):
        pass


def test_chaos_depends_on_the_seed_alone():
    def order(seed):
        with emulator.options(mode="chaos", seed=seed):
            return outcome(
                "atom.global.add.u32 %r0, [%p0], 1;", "%r0", np.zeros(1, np.uint32), block=1024
            ).tolist()

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_stats_count_successful_launches():
    """Check that launches that succeed are counted, and that a failed launch is not."""
    x = np.zeros(64, np.uint32)
    run(ADD_ONE, x, 1, grid=2)
    stats = emulator.stats()
    assert stats["ctas"] == 2
    assert stats["op.LD"] == 2 * 3  # two parameters and a load
    assert stats["thread_insns"] == 32 * stats["warp_insns"]
    assert stats["st_global_bytes"] == 256
    with pytest.raises(emulator.EmulatorError):
        run("trap;")
    assert emulator.stats() == stats  # a failed launch does not count
    emulator.reset_stats()
    assert emulator.stats()["warp_insns"] == 0


@pytest.mark.parametrize(
    ("body", "ordered", "racy"),
    [
        pytest.param(
            """shl.b32 %r1, %t, 2; add.u32 %r2, %r0, %r1; xor.b32 %r3, %r1, 128;
    add.u32 %r4, %r0, %r3; st.shared.b32 [%r2], %t; {} ld.shared.b32 %r5, [%r4];""",
            "bar.sync 0;",
            ("", "bar.arrive 1, 128;"),
            id="read after write",
        ),
        pytest.param(
            """and.b32 %r1, %t, 31; shl.b32 %r1, %r1, 2; add.u32 %r0, %r0, %r1;
    @%q1 st.shared.b32 [%r0], %t; bar.sync 0;
    @!%q1 ld.shared.b32 %r2, [%r0]; {} @%q1 st.shared.b32 [%r0], %t;""",
            "bar.sync 0;",
            ("",),
            id="write after read",
        ),
        pytest.param(
            """mov.u32 %r1, bar; setp.eq.u32 %q0, %t, 0;
    @%q0 mbarrier.init.shared::cta.b64 [%r1], 1;
    bar.sync 0; @!%q1 bra READER; @%q0 st.shared.b32 [%r0], %t;
    @%q0 mbarrier.arrive{}.shared::cta.b64 _, [%r1]; bra DONE;
    READER: W: mbarrier.try_wait.parity.shared::cta.b64 %q2, [%r1], 0; @!%q2 bra W;
    ld.shared.b32 %r2, [%r0]; DONE:""",
            "",
            (".relaxed.cta",),
            id="relaxed arrival",
        ),
    ],
)
def test_data_races_between_warps(body, ordered, racy):
    head = """.shared .align 4 .b8 s[256]; .shared .align 8 .b64 bar;
mov.u32 %r0, s; setp.lt.u32 %q1, %t, 32;
"""
    with emulator.options(races=True):
        run(head + body.format(ordered), block=64)
        for order in racy:
            with fails(
                r"data race on shared offset \d+: .* by warp \d of CTA rank 0"
                r" \(PTX line \d+\) is not ordered"
            ):
                run(head + body.format(order), block=64)
    run(head + body.format(racy[0]), block=64)


_STUB = """
import sys, types
package = types.ModuleType("cute_kernels")  # whose own modules import torch
package.__path__ = ["cute_kernels"]
sys.modules["cute_kernels"] = package
"""
_NUM_SMS = f"""{_STUB}
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from cute_kernels import emulator
from cute_kernels.emulator import engine

emulator.load_ptx('''.version 8.8
.target sm_100a
.visible .entry k(.param .u64 p) {{
.reg .pred %q; .reg .b32 %r<3>; .reg .b64 %d; ld.param.u64 %d, [p]; mov.u32 %r0, 0;
LOOP: add.u32 %r0, %r0, 1; setp.lt.u32 %q, %r0, 300; @%q bra LOOP;
mov.u32 %r1, %nsmid; st.global.b32 [%d], %r1; }}''')

def num_sms():
    x = np.zeros(1, np.uint32)
    emulator.launch("k", (4,), (64,), (x,))
    return int(x[0])
"""


def test_options_hold_for_one_thread():
    printed = run_python(f"""{_NUM_SMS}
wrong = []
def work(number):
    for i in range(30):
        with emulator.options(num_sms=number, mode="chaos" if i % 2 else "eager", seed=i):
            if num_sms() != number:
                wrong.append(number)
        if num_sms() != 4:
            wrong.append(4)
list(ThreadPoolExecutor(6).map(work, range(5, 11)))
print(wrong, emulator.stats()["ctas"])
""")
    assert printed.split() == ["[]", str(6 * 30 * 2 * 4)]


def test_a_child_forked_while_a_thread_launches_can_launch():
    printed = run_python(f"""{_NUM_SMS}
inside, release = threading.Event(), threading.Event()
def hold():
    with engine.exclusive():
        inside.set()
        release.wait()
thread = threading.Thread(target=hold)
thread.start()
inside.wait()
child = os.fork()
if not child:
    signal.alarm(60)  # ends a child that hangs
    os._exit(num_sms())
status = os.waitpid(child, 0)[1]
release.set()
thread.join()
print(status >> 8, num_sms())
""")
    assert printed.split() == ["4", "4"]


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(emulator.BuildError, match=r"no-such-compiler.*apt-get install g\+\+"):
        compilation.compiler()


def test_a_cache_directory_that_cannot_be_used(monkeypatch, tmp_path):
    """Check that a cache directory that others may write gives a warning and is not used."""
    (tmp_path / "emulator").mkdir()
    (tmp_path / "emulator").chmod(0o775)  # Other users may write it.
    (tmp_path / "private").mkdir()
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setattr(compilation.tempfile, "gettempdir", lambda: str(tmp_path / "private"))
    with pytest.warns(RuntimeWarning, match=f"not stored in {tmp_path}/emulator: .*chmod go-w"):
        directory = compilation.cache_directory()
    assert directory == tmp_path / "private" / f"cute_kernels-{os.getuid()}" / "emulator"
    monkeypatch.setattr(compilation, "cache_root", lambda: None)
    assert compilation.cache_directory() == directory


def test_the_digest_follows_the_sources(monkeypatch, tmp_path):
    """Check that the digest changes with the C++ sources."""
    copy = tmp_path / "src"
    shutil.copytree(compilation._SOURCES, copy)
    cxx = compilation.compiler()
    before = compilation._digest(cxx)
    monkeypatch.setattr(compilation, "_SOURCES", copy)
    assert compilation._digest(cxx) == before
    with (copy / "bits.cpp").open("a") as file:
        file.write("// changed\n")
    assert compilation._digest(cxx) != before


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """Return the list of (pretended) compilations, with an empty cache folder."""
    compiled = []

    def pretend(cxx, work):
        compiled.append(cxx)
        (work / "engine.so").write_bytes(b"machine code" * 100)
        return work / "engine.so"

    monkeypatch.setattr(compilation, "_compile", pretend)
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    return compiled


LIBRARY_DAMAGE = DAMAGE | {
    "no hash": lambda path: path.with_suffix(".sha256").unlink(),
    "writable": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", LIBRARY_DAMAGE.values(), ids=LIBRARY_DAMAGE)
def test_a_damaged_library_is_built_again(compilations, damage):
    """Check that a damaged library is compiled again, once."""
    build = compilation.build.__wrapped__
    library = build()
    good = library.read_bytes()
    assert build() == library and len(compilations) == 1
    damage(library)
    for _ in range(2):
        assert build() == library and len(compilations) == 2
        assert library.read_bytes() == good


def test_a_failed_build_is_reported(monkeypatch, tmp_path):
    (tmp_path / "machine.h").write_text("this is no C++")
    monkeypatch.setattr(compilation, "_SOURCES", tmp_path)
    with pytest.raises(emulator.BuildError, match="did not compile"):
        compilation._compile(compilation.compiler(), tmp_path)


def test_two_processes_build_one_library(tmp_path):
    """Check that two processes that start together share one build of the library."""
    source, cache = tmp_path / "src", tmp_path / "cache"
    source.mkdir()
    (source / "machine.h").write_text("#pragma once\n")
    (source / "api.cpp").write_text('extern "C" int answer() { return 42; }\n')
    code = f"""{_STUB}
from pathlib import Path
from cute_kernels.emulator import compilation
compilation._SOURCES = Path({str(source)!r})
print(compilation.build())"""
    environment = {**os.environ, "CUTE_KERNELS_CACHE_DIR": str(cache)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed = {p.communicate()[0].strip() for p in processes}
    libraries = list((cache / "emulator").glob("*.so"))
    assert printed == {str(libraries[0])}
    assert len(libraries) == 1
    assert ctypes.CDLL(str(libraries[0])).answer() == 42
    assert not list((cache / "emulator").glob("build-*"))


def test_a_folder_named_like_the_library_is_replaced(tmp_path):
    """Check that a folder that has the name of the library is replaced."""
    built, library = tmp_path / "built.so", tmp_path / "library.so"
    built.write_bytes(b"code")
    (library / "inside").mkdir(parents=True)
    compilation._install(built, library)
    assert library.read_bytes() == b"code" and compilation._is_intact(library)
