"""Which files may hold code that is loaded into this process.

Whoever can write a file that is loaded runs code as this user. So code is taken only from folders
and files that belong to this user or to root, and that nobody else may write. Root's are taken
because root needs no file to run code as this user, and because images are filled with compiled
kernels by root. A folder's own parents are not looked at: who can exchange the folder cannot make
one of this user's.
"""

import contextlib
import os
import shutil
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0
#: Of files and of folders that are made here, less what the umask takes. They are readable by all:
#: an image is filled by root and used by others.
FILE_MODE = 0o644
_FOLDER_MODE = 0o755


def distrust(status: os.stat_result) -> str | None:
    """Why code is not taken from what has this status, or None if it is."""
    user = os.geteuid()
    if status.st_uid not in (user, _ROOT):
        return f"it belongs to user {status.st_uid}, not to {user} or root"
    if status.st_mode & _OTHERS_WRITE:
        return f"other users may write it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
    return None


def make_folder(path: Path) -> None:
    """Make a folder, with its parents, that no other user may write, whatever the umask is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=_FOLDER_MODE, exist_ok=True)


def open_folder(path: Path) -> int:
    """Open a folder that code may be taken from; the caller closes the descriptor.

    Raises:
        OSError: there is no such folder, or it may not be read.
        PermissionError: another user owns it or can write it.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if reason := distrust(os.fstat(folder)):
        os.close(folder)
        raise PermissionError(f"{path} is not used: {reason}")
    return folder


def read_file(folder: int, name: str) -> bytes:
    """The bytes of a file in a folder from ``open_folder``.

    What is checked and what is read are one open file, which nobody can exchange in between.

    Raises:
        OSError: there is no such file, it is not a regular one, or it may not be read.
        PermissionError: another user owns it or can write it.
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
    """Put a file in its place at once, which no other user may write, whatever the umask is.

    A folder in its place is deleted: else the file would be missing for ever.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # of a process that died and had this number
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, FILE_MODE), "wb") as file:
            file.write(data)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
