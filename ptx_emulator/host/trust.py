"""Checks of the files and folders from which this process loads code.

A user who can write a file that is loaded runs code as this user. Code is therefore loaded only
from folders and files that belong to this user or to root, and that no other user may write. Root
is trusted because root can run code as this user anyway, and because root fills images with
compiled kernels. Parent folders are not checked: a user who can replace the folder cannot create
one that belongs to this user.
"""

import contextlib
import os
import shutil
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0
#: Modes of new files and folders, before the umask. All users can read them: root may fill an
#: image that other users use.
FILE_MODE = 0o644
_FOLDER_MODE = 0o755


def distrust(status: os.stat_result) -> str | None:
    """Return why code is not loaded from a file with this status, or None if it is."""
    user = os.geteuid()
    if status.st_uid not in (user, _ROOT):
        return f"it belongs to user {status.st_uid}, not to {user} or root"
    if status.st_mode & _OTHERS_WRITE:
        return f"other users may write it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
    return None


def make_folder(path: Path) -> None:
    """Create a folder and its parents. No other user may write it, whatever the umask is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def open_folder(path: Path) -> int:
    """Open a folder that code may be loaded from. The caller closes the descriptor.

    Raises:
        OSError: The folder does not exist or may not be read.
        PermissionError: Another user owns it or can write it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if reason := distrust(os.fstat(folder)):
        os.close(folder)
        raise PermissionError(f"{path} is not used: {reason}")
    return folder


def read_file(folder: int, name: str) -> bytes:
    """Return the bytes of a file in a folder from ``open_folder``.

    The check and the read use one open file, which nobody can replace in between.

    Raises:
        OSError: The file does not exist, is not a regular file, or may not be read.
        PermissionError: Another user owns it or can write it.
    """
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file")
        if reason := distrust(status):
            raise PermissionError(f"{name} is not used: {reason}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically. No other user may write it, whatever the umask is.

    A folder at the same path is deleted first.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.unlink(missing_ok=True)  # left over by a dead process with the same id
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, FILE_MODE), "wb") as file:
            file.write(data)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
