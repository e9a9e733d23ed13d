"""The disk cache of kernels: damaged and untrusted entries, keys, and the sources in a key."""

import dataclasses
import enum
import importlib
import json
import os
import shutil
import sys
import tempfile
import types
from pathlib import Path

import filelock  # noqa: F401  (a user without privileges may not be able to import it)
import pytest
import torch

from cute_kernels.formats import NVFP4
from cute_kernels.runtime import architecture, cache, sources
from cute_kernels.runtime.aot import FAMILIES
from cute_kernels.runtime.cache import CacheKey, DiskCache, cache_key, default_cache
from cute_kernels.runtime.spec import canonical_text, resolve
from tests.helpers import DAMAGE

from .toy_kernels import Scale

SPEC = Scale(2.0)
KEY, NEW = CacheKey("kernel", {"spec": "s", "arch": "sm_100a"}), CacheKey("new", {})
FILES = {"o": b"object code" * 100, "ptx": b".version 9.0"}


@pytest.fixture
def disk(tmp_path):
    return DiskCache(tmp_path / "kernels")


@pytest.fixture
def stored(disk):
    assert disk.store(KEY, FILES)
    return disk


@pytest.fixture
def read_only_folder():
    """Yield a cache folder with one entry that this process cannot write."""
    folder = Path(tempfile.mkdtemp())
    DiskCache(folder).store(KEY, FILES)
    folder.chmod(0o555)
    if os.geteuid() == 0:  # root may write everywhere
        os.seteuid(65534)
    yield folder
    os.seteuid(os.getuid())
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_stored_entry_can_be_loaded(stored):
    assert stored.load(KEY) == FILES
    assert not list(stored.root.glob("*.part"))


ENTRY_DAMAGE = DAMAGE | {
    "empty": lambda path: path.write_bytes(b""),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    "damage",
    ENTRY_DAMAGE.values(),
    ids=ENTRY_DAMAGE,
)
@pytest.mark.parametrize("suffix", ["o", "ptx", "json"])
def test_a_damaged_entry_is_a_miss(stored, suffix, damage):
    damage(stored.root / f"{KEY.name}.{suffix}")
    assert stored.load(KEY) is None


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "{}", '{"key": {}}', '{"key": {}, "files": 1}', "[" * 100_000],
    ids=range(6),
)
def test_a_json_file_of_another_form_is_a_miss(stored, text):
    (stored.root / f"{KEY.name}.json").write_text(text)
    assert stored.load(KEY) is None


def test_an_entry_that_names_files_elsewhere_is_a_miss(stored, tmp_path):
    """Check that an entry that names files elsewhere is not used."""
    meta = stored.root / f"{KEY.name}.json"
    entry = json.loads(meta.read_text())
    (stored.root / f"{KEY.name}.").mkdir()
    (tmp_path / "elsewhere").write_bytes(FILES["o"])
    entry["files"] = {"/../../elsewhere": entry["files"]["o"]}
    meta.write_text(json.dumps(entry))
    assert stored.load(KEY) is None


@pytest.mark.parametrize("suffix", ["o", "ptx", "json"])
def test_a_file_that_others_can_write_is_a_miss(stored, suffix):
    """Check that a file that others can write is not used."""
    (stored.root / f"{KEY.name}.{suffix}").chmod(0o664)
    with pytest.warns(RuntimeWarning, match=f"compiled again: .*{suffix} is not used.*chmod go-w"):
        assert stored.load(KEY) is None
    assert stored.store(KEY, FILES)
    assert stored.load(KEY) == FILES


def test_a_folder_that_others_can_write_is_neither_read_nor_written(stored):
    """Check that a folder that others can write is neither read nor written."""
    stored.root.chmod(0o777)
    before = sorted(stored.root.iterdir())
    with pytest.warns(RuntimeWarning, match=f"{stored.root} is not used.*chmod go-w") as caught:
        assert stored.load(KEY) is None
        with stored.lock(NEW):
            assert not stored.store(NEW, FILES)
    assert [str(warning.message).partition(":")[0] for warning in caught] == [
        "cached kernels are not used",
        "compiled kernels are not kept on disk",
    ]
    assert sorted(stored.root.iterdir()) == before
    stored.root.chmod(0o755)
    assert stored.load(KEY) == FILES


def test_an_entry_of_another_key_is_a_miss(stored):
    """Check that an entry of another key is not used."""
    other_key = CacheKey("kernel", {**KEY.facts, "arch": "sm_90a"})
    assert other_key.name != KEY.name
    for suffix in ("json", *FILES):
        shutil.copy(
            stored.root / f"{KEY.name}.{suffix}", stored.root / f"{other_key.name}.{suffix}"
        )
    assert stored.load(other_key) is None


def test_a_writer_that_dies_leaves_a_miss(disk, monkeypatch):
    """Check that an incomplete entry is not used, and that it can be written again."""
    replace = Path.replace

    def die_at_the_last(self, target):
        if Path(target).suffix == ".json":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", die_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        disk.store(KEY, FILES)
    monkeypatch.undo()
    assert {path.suffix for path in disk.root.glob(f"{KEY.name}.*")} >= {".o", ".ptx"}
    assert disk.load(KEY) is None
    assert disk.store(KEY, FILES)
    assert disk.load(KEY) == FILES


def test_a_read_only_folder_serves_hits_and_warns_once(read_only_folder):
    """Check that a read-only folder is read, with one warning for writes."""
    disk = DiskCache(read_only_folder)
    assert disk.load(KEY) == FILES
    with pytest.warns(RuntimeWarning, match="not kept on disk.*denied") as caught:
        for _ in range(2):
            with disk.lock(NEW):
                assert not disk.store(NEW, FILES)
    assert len(caught) == 1
    assert disk.load(NEW) is None


def test_the_environment_chooses_the_folder(monkeypatch, tmp_path):
    """Check which environment variables choose the folder."""
    variables = {"CUTE_KERNELS_CACHE_DIR": "kernels", "XDG_CACHE_HOME": "xdg", "HOME": "home"}
    folders = ("kernels", "xdg/cute_kernels", "home/.cache/cute_kernels")
    for name, folder in variables.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    for name, folder in zip(variables, folders, strict=True):
        assert default_cache().root == tmp_path / folder
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUTE_KERNELS_CACHE", "0")
    assert default_cache() is None


def test_waiting_for_a_lock_times_out(disk, monkeypatch):
    """Check that waiting for a lock times out."""
    monkeypatch.setattr(cache, "_LOCK_TIMEOUT_S", 0.05)
    entered = False
    with disk.lock(KEY), pytest.warns(RuntimeWarning, match="was held for"), disk.lock(KEY):
        entered = True
    assert entered


def key_name(spec=SPEC, arch="sm_100a"):
    return cache_key(spec, architecture(arch)).name


def test_arguments_and_architecture_are_in_the_key():
    names = [key_name(), key_name(Scale(3.0)), key_name(Scale(2.0, "Float16"))]
    names += [key_name(arch=arch) for arch in ("sm_103a", "sm_90a", "emulated:sm_100a")]
    assert len(set(names)) == 6


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(cache, "installed_versions", lambda: ("dsl-4.8.2",)),
        lambda patch: patch.setattr(cache.platform, "python_version", lambda: "3.99.0"),
        lambda patch: patch.setattr(cache, "_host", lambda: "another CPU"),
        lambda patch: patch.setattr(cache, "_source_digest", lambda *modules: "edited"),
        lambda patch: patch.setattr(cache, "_LAYOUT", 99),
        lambda patch: patch.setenv("CUTE_DSL_LINEINFO", "1"),
        lambda patch: patch.setenv("CUTE_DSL_ADDED_IN_A_LATER_VERSION", "1"),
    ],
)
def test_versions_sources_host_and_options_are_in_the_key(monkeypatch, change):
    before = key_name()
    change(monkeypatch)
    assert key_name() != before


def test_dump_folders_of_the_dsl_are_not_in_the_key(monkeypatch):
    before = key_name()
    for name in ("CUTE_DSL_DUMP_DIR", "CUTE_DSL_ARCH", "CUTE_DSL_KEEP", "CUTE_DSL_LIBS"):
        monkeypatch.setenv(name, "changed")
    assert key_name() == before


@pytest.fixture
def foreign_package(tmp_path, monkeypatch):
    """Create and import a package outside of ours with one kernel module."""
    package = tmp_path / "others_kernels"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "kernel.py").write_text("SIZE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("others_kernels")
    yield package
    del sys.modules["others_kernels"]


def source_digest(module="others_kernels.inner"):
    cache._source_digest.cache_clear()
    return cache._source_digest(module)


def test_all_sources_of_the_package_are_in_the_digest(foreign_package):
    """Check that the digest covers all sources of the package."""
    before = source_digest()
    assert before is not None and before != source_digest("cute_kernels.kernels.gemm")
    (foreign_package / "inner" / "kernel.py").write_text("SIZE = 2\n")
    edited = source_digest()
    (foreign_package / "inner" / "added.py").touch()
    assert len({before, edited, source_digest()}) == 3


def test_sources_edited_since_the_start_are_not_trusted(foreign_package, monkeypatch):
    """Check that a digest is refused if sources changed after the process started."""
    source = foreign_package / "inner" / "kernel.py"
    monkeypatch.setattr(cache, "_STARTED", source.stat().st_mtime + 1e9)
    assert source_digest() is not None
    os.utime(source, (2e9 + cache._STARTED, 2e9 + cache._STARTED))
    assert source_digest() is None


def test_an_unreadable_source_is_not_trusted(foreign_package):
    (foreign_package / "gone.py").symlink_to(foreign_package / "nowhere.py")
    assert source_digest() is None


def every_spec():
    for family in FAMILIES:
        for arch in ("sm_90a", "sm_100a"):
            yield from importlib.import_module(family).kernel_specs(arch)


def spec_modules(spec):
    return type(spec).__module__, spec.kernel.partition(":")[0]


MODULES_OF_KERNELS = sorted({spec_modules(spec) for spec in every_spec()})


def sources_of(*modules):
    return set(sources.source_files([sources.module_file(module) for module in modules]))


def modules_of_objects(module):
    """Yield our modules that define the functions and classes held by a module."""
    for value in vars(module).values():
        if isinstance(value, types.ModuleType) and hasattr(module, "__path__"):
            continue  # A package holds every submodule that anything has imported.
        values = [value, *vars(value).values()] if isinstance(value, type) else [value]
        for member in values:
            name = (
                member.__name__
                if isinstance(member, types.ModuleType)
                else getattr(member, "__module__", None)
            )
            if isinstance(name, str) and name.startswith("cute_kernels."):
                yield name


@pytest.mark.parametrize("modules", MODULES_OF_KERNELS)
def test_every_module_that_a_kernel_uses_is_in_its_key(modules):
    """Modules are found through the objects that each module holds, not by reading sources."""
    pytest.importorskip("cutlass")
    files, visited, pending = sources_of(*modules), set(), list(modules)
    while pending:
        name = pending.pop()
        if name not in visited:
            visited.add(name)
            pending += modules_of_objects(importlib.import_module(name))
    missing = {name for name in visited if sources.module_file(name) not in files}
    assert not missing


@pytest.mark.parametrize(
    ("kernel", "source"),
    [
        (
            "cute_kernels.kernels.moe.router:RouterKernel",
            "reference/router.py",
        ),  # its constant TINY
        ("cute_kernels.kernels.gemm.sm90.kernel:Sm90Gemm", "capability.py"),
        ("cute_kernels.kernels.quantize.tiles.kernel:TileQuantizer", "formats/base.py"),
        ("cute_kernels.kernels.quantize.dequantize:Dequantizer", "layout/slots.py"),
        ("cute_kernels.kernels.gemm.sm100.kernel:Sm100Gemm", "records.py"),
    ],
)
def test_constants_from_other_modules_are_in_the_key(kernel, source, monkeypatch):
    """Check that the key covers constants from other modules."""
    spec = next(spec for spec in every_spec() if spec.kernel == kernel)
    before = cache_key(spec, architecture("sm_90a")).name
    path, read = sources.module_file("cute_kernels").parent / source, sources._read
    assert path.is_file()

    def edited(file, modified):
        digest, imported = read(file, modified)
        return b"edited" if file == path else digest, imported

    monkeypatch.setattr(sources, "_read", edited)
    cache._source_digest.cache_clear()
    assert cache_key(spec, architecture("sm_90a")).name != before


def test_ops_runtime_and_other_kernels_are_not_in_the_key():
    """Check that the key does not cover ops, the runtime and other kernels."""
    root = sources.module_file("cute_kernels").parent
    names = {
        path.relative_to(root).as_posix()
        for path in sources_of("cute_kernels.kernels.gemm.sm90.kernel")
    }
    excluded = ("ops/", "runtime/", "kernels/quantize/", "kernels/moe/")
    assert not [name for name in names if name.startswith(excluded)]
    assert "__init__.py" not in names


@pytest.mark.parametrize(
    ("source", "package", "names"),
    [
        (b"from ..formats import parse", "cute_kernels.ops", ["formats/__init__.py"]),
        (
            b"from . import checks, nothing",
            "cute_kernels.ops",
            ["ops/checks.py", "ops/__init__.py"],
        ),
        (b"def f():\n from .records import check_kind", "cute_kernels", ["records.py"]),
        (b"import cute_kernels.layout.slots as slots", "", ["layout/slots.py"]),
        (b"import torch\nfrom cutlass import cute", "cute_kernels.device", []),
    ],
)
def test_imports_are_found_in_sources(source, package, names):
    root = sources.module_file("cute_kernels").parent
    assert [
        path.relative_to(root).as_posix() for path in sources.imported_files(source, package)
    ] == names


def test_a_folder_named_like_an_entry_is_replaced(stored):
    for suffix in ("json", "o"):
        path = stored.root / f"{KEY.name}.{suffix}"
        path.unlink()
        (path / "inner").mkdir(parents=True)
        assert stored.load(KEY) is None
        assert stored.store(KEY, FILES) and stored.load(KEY) == FILES


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Quiet:
    size: int = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Holder:
    value: object


def test_values_have_distinct_texts():
    values = [None, 1, 1.0, True, "1", (), (1,), ((1,),), (1, 2), frozenset({1}), Color.RED, Color]
    values += [Quiet(1), Quiet(2), NVFP4(), NVFP4(row_scaled=True)]
    assert len({canonical_text(Holder(value)) for value in values}) == len(values)


@pytest.mark.parametrize("value", [[1], {"a": 1}, object(), torch.zeros(1), print])
def test_values_without_a_stable_text_are_refused(value):
    with pytest.raises(TypeError, match="no stable text"):
        canonical_text(Holder((value,)))


def test_kernel_names_resolve_to_classes():
    assert resolve("tests.runtime.toy_kernels:Scale") is Scale


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tests.runtime.toy_kernels:Nothing",
            "module tests.runtime.toy_kernels has no 'Nothing'",
        ),
        ("tests.runtime.nothing:Scale", "No module named 'tests.runtime.nothing'"),
    ],
)
def test_kernel_names_without_a_class_raise(name, message):
    with pytest.raises(ImportError, match=message):
        resolve(name)


@pytest.mark.parametrize("name", ["tests.runtime", "tests.runtime:", ":Scale"])
def test_texts_that_are_not_kernel_names_raise(name):
    with pytest.raises(ValueError, match="must be 'package.module:Class', got"):
        resolve(name)
