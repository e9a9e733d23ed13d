"""Host utilities: environment settings, trusted files, locks across forks, and the bug report."""

import importlib.metadata
import os
import signal
import threading
import time

import pytest

import grouped
from cute_kernels.__main__ import report
from ptx_emulator.host import settings
from ptx_emulator.host.locks import ForkSafeLock
from ptx_emulator.host.trust import make_folder, open_folder, read_file, write_file

NOBODY = 65534


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())


@pytest.fixture
def folder(tmp_path):
    write_file(tmp_path / "file", b"code")
    return tmp_path


def read(folder, name="file"):
    descriptor = open_folder(folder)
    try:
        return read_file(descriptor, name)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("text", ["", "2", "y", "none", "enabled"])
def test_texts_that_are_not_booleans_raise(text):
    with pytest.raises(ValueError, match=f"NAME must be one of .*, got '{text}'"):
        settings.boolean("NAME", text)


@pytest.mark.parametrize(
    ("text", "is_on"), [(None, True), ("", True), ("on", True), ("off", False), ("False", False)]
)
def test_the_environment_turns_the_kernel_cache_off(monkeypatch, text, is_on):
    if text is None:
        monkeypatch.delenv("CUTE_KERNELS_CACHE", raising=False)
    else:
        monkeypatch.setenv("CUTE_KERNELS_CACHE", text)
    assert settings.kernel_cache_is_on() == is_on


@pytest.mark.parametrize("variable", ["CUTE_KERNELS_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_cache_folder_of_an_unknown_user(monkeypatch, variable):
    monkeypatch.delenv("CUTE_KERNELS_CACHE_DIR", raising=False)
    monkeypatch.setenv(variable, "~nosuchuser/cache")
    with pytest.warns(RuntimeWarning, match="would be in ~nosuchuser/cache.*home directory"):
        assert settings.cache_root() is None


def test_a_written_file_can_be_read(folder):
    assert read(folder) == b"code"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_files_are_not_writable_by_others_under_any_umask(tmp_path):
    before = os.umask(0)
    try:
        make_folder(tmp_path / "folder")
        write_file(tmp_path / "folder" / "file", b"code")
    finally:
        os.umask(before)
    assert read(tmp_path / "folder") == b"code"


@pytest.mark.parametrize("mode", [0o20, 0o02])
@pytest.mark.parametrize("name", ["", "file"])
def test_paths_that_others_can_write_are_refused(folder, name, mode):
    path = folder / name
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(PermissionError, match="other users may write it.*chmod go-w"):
        read(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "file"])
def test_paths_of_another_user_are_refused(folder, name):
    os.chown(folder / name, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}, not to 0 or root"):
        read(folder)


def test_the_target_of_a_link_is_checked(folder):
    """Check that the target of a link is checked."""
    (folder / "link").symlink_to("file")
    assert read(folder, "link") == b"code"
    (folder / "file").chmod(0o666)
    with pytest.raises(PermissionError, match="link is not used"):
        read(folder, "link")


def test_pipes_and_folders_are_refused(folder):
    os.mkfifo(folder / "pipe", 0o644)
    (folder / "inner").mkdir()
    for name in ("pipe", "inner"):
        with pytest.raises(OSError, match="not a regular file"):
            read(folder, name)


def in_child(work):
    """Return the exit status of a forked child that runs ``work``; 14 if it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_lock_of_another_thread_is_free_in_a_child():
    """Check that a lock held by another thread is free in a forked child."""
    orphaned = []
    lock, second_lock = ForkSafeLock(lambda: orphaned.append(1)), ForkSafeLock()
    acquired, release = threading.Event(), threading.Event()

    def hold():
        with lock:
            acquired.set()
            release.wait()

    def take():
        with lock, lock, second_lock:
            assert orphaned == [1]

    thread = threading.Thread(target=hold)
    thread.start()
    acquired.wait()
    try:
        assert in_child(take) == 0
    finally:
        release.set()
        thread.join()
    assert not orphaned
    with lock:
        assert in_child(lambda: None) == 0


def test_a_lock_of_the_forking_thread_stays_locked():
    """Check that a lock held by the forking thread stays locked in the child."""
    lock = ForkSafeLock(lambda: os._exit(2))
    acquired = []

    def work():
        """Check in the child that another thread waits for the lock."""

        def steal():
            with lock:
                acquired.append(1)

        thread = threading.Thread(target=steal, daemon=True)
        thread.start()
        time.sleep(0.05)
        assert not acquired
        lock.__exit__(None, None, None)
        thread.join()
        assert acquired

    with lock:
        assert in_child(work) == 0


def test_the_report_lists_versions_and_settings(monkeypatch, tmp_path):
    """Check that the report has versions and settings."""
    monkeypatch.setenv("CUTE_KERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUTE_KERNELS_BACKEND", "nope")
    pairs = dict(report())
    assert pairs["grouped-kernels"].startswith(grouped.__version__)
    assert pairs["torch"] == importlib.metadata.version("torch")
    assert pairs["kernel cache"] == str(tmp_path)
    assert "nope" in pairs["backend of cpu tensors"]
    assert pairs["CUTE_KERNELS_BACKEND"] == "nope"
    monkeypatch.setattr(importlib.metadata, "version", _no_package)
    assert dict(report())["nvidia-cutlass-dsl"] == "not installed"


def _no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)
