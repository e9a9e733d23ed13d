"""Give the package a README whose links work on PyPI. All other settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

SITE = "https://grouped-kernels.readthedocs.io/en/latest"


def absolute(link: re.Match) -> str:
    """Return a link to the site; the text alone if the file is not part of the site."""
    text, target = link["text"], link["target"]
    if "://" in target:
        return link[0]
    if not target.startswith("docs/"):
        return text.removeprefix("!")[1:-1]
    page = target.removeprefix("docs/")
    return f"{text}({SITE}/{re.sub(r'[.]md(?=#|$)', '.html', page)})"


README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
LINK = re.compile(r"(?P<text>!?\[[^]]*\])\((?P<target>[^)\s]+)\)")
setup(
    long_description=LINK.sub(absolute, README),
    long_description_content_type="text/markdown",
)
