"""Settings from environment variables."""

import os
import warnings
from pathlib import Path

from .suggestions import did_you_mean

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
#: Environment variables of the packages.
VARIABLES = (
    "CUTE_KERNELS_BACKEND",
    "CUTE_KERNELS_CACHE",
    "CUTE_KERNELS_CACHE_DIR",
    "CUTE_KERNELS_TEST_GPU",
)
_PREFIX = "CUTE_KERNELS_"
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn with ``message``, at most once per process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def warn_about_unknown_variables() -> None:
    """Warn once about each environment variable ``CUTE_KERNELS_...`` that nothing reads."""
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in VARIABLES:
            warn_once(
                f"the environment variable {name} has no effect; there are {', '.join(VARIABLES)}"
                + did_you_mean(name, VARIABLES)
            )


def boolean(source: str, text: str) -> bool:
    """Return the value of ``text``: 1, true, yes, on or 0, false, no, off, in any case.

    Args:
        source: Origin of the text, for the error message.
        text: Text that the user wrote.

    Raises:
        ValueError: ``text`` is none of these.
    """
    value = _BOOLEANS.get(text.strip().lower())
    if value is None:
        raise ValueError(f"{source} must be one of {', '.join(_BOOLEANS)}, got {text!r}")
    return value


def kernel_cache_is_on() -> bool:
    """Return True if compiled kernels are cached on disk, unless ``CUTE_KERNELS_CACHE`` is false.

    Raises:
        ValueError: The variable is neither empty nor a boolean.
    """
    text = os.environ.get("CUTE_KERNELS_CACHE")
    return not text or boolean("CUTE_KERNELS_CACHE", text)


def cache_root() -> Path | None:
    """Return the cache folder for compiled kernels and, in a subfolder, the emulator's library.

    ``CUTE_KERNELS_CACHE_DIR`` names it. The default is ``cute_kernels`` in the user's cache folder
    (``XDG_CACHE_HOME`` or ``~/.cache``).

    Returns:
        The folder, which may not exist yet. None, with a warning, if it would be in the home folder
        of a user who has none.
    """
    chosen = os.environ.get("CUTE_KERNELS_CACHE_DIR")
    path = Path(chosen or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        path = path.expanduser()
    except RuntimeError as error:
        warn_once(
            f"compiled code is not cached on disk, the cache folder would be in {path}: {error} "
            "Set CUTE_KERNELS_CACHE_DIR"
        )
        return None
    return path if chosen else path / "cute_kernels"
