"""``perf freeze``: record what a refactoring must not change, and check against the record.

The file has a hash of the PTX of each kernel that is compiled ahead of time, and the tiles that
grouped GEMMs choose. Hashes ignore names, so that classes, modules, fields and methods can be
renamed; spec texts beside them only say which kernels differ.
"""

import argparse
import collections
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cute_kernels.runtime.aot import declared_specs, precompile
from cute_kernels.runtime.arch import Architecture, architecture
from cute_kernels.runtime.cache import cache_key, default_cache
from cute_kernels.runtime.spec import KernelSpec, canonical_text

from .records import RESULTS, load
from .tile_choices import ARCHITECTURES, Choices, choose, count_recorded

#: Sections of a file: hashes of kernels by architecture, and tiles of GEMMs by GPU.
SECTIONS = ("kernels", "tiles")
#: Hexadecimal digits of a SHA-256 that are stored. Two of 2,000 kernels share 16 by chance with a
#: probability of 1e-13.
_DIGITS = 16
#: Differences of one kind that are printed.
_SHOWN = 20
#: Texts that tell kinds of differences apart.
_KINDS = ("are missing: ", "are new: ", "tiles of ")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
#: Variables of a module, registers that inline assembly declares by name, and labels of it. Names
#: of the compiler begin with ``%`` or ``$``.
_VARIABLE = re.compile(r"\.(?:shared|global|const)\s[^;=()]*?\.[bsufv]\d+\s+([A-Za-z_][\w$]*)")
_REGISTERS = re.compile(r"\.reg\s+\.\w+\s+([^%;][^;]*);")
_LABEL = re.compile(r"(?:^|[;{}])\s*([A-Za-z_][\w$]*)\s*:", re.MULTILINE)
_PUNCTUATION = re.compile(r"\s*([,;{}])\s*")

#: Spec texts by hash: several kernels may have the same code.
Hashes = dict[str, list[str]]
#: Numbers of rows by tiles by case: the choices of a GPU as a file has them.
Tiles = dict[str, dict[str, list[int]]]


def normalize(ptx: str) -> str:
    """Return PTX without comments and layout, and with numbers for names that Python code chose.

    Kernels become ``kernel_0``, ``kernel_1`` and so on in the order in which they appear, also
    inside of other names. Variables of the module, and registers and labels of inline assembly
    become ``name_0`` and so on. Different names stay different.
    """
    text = _COMMENT.sub(" ", ptx)
    kernels = {name: f"kernel_{i}" for i, name in enumerate(dict.fromkeys(_ENTRY.findall(text)))}
    # A name may begin with another one.
    for name in sorted(kernels, key=len, reverse=True):
        text = text.replace(name, kernels[name])
    chosen = {name: text.find(name) for name in (*_VARIABLE.findall(text), *_LABEL.findall(text))}
    for declared in _REGISTERS.findall(text):
        for name in declared.split(","):
            chosen.setdefault(name.strip().partition("<")[0], 0)
    if chosen:
        alternatives = "|".join(map(re.escape, sorted(chosen, key=len, reverse=True)))
        numbers: dict[str, str] = {}

        def numbered(match: re.Match[str]) -> str:
            return numbers.setdefault(match[0], f"name_{len(numbers)}")

        # Text after a dot is part of an instruction, such as ``mul.lo.s64``.
        text = re.sub(rf"(?<![\w.%$])(?:{alternatives})(?![\w$])", numbered, text)
    return _PUNCTUATION.sub(r"\1", " ".join(text.split()))


def ptx_hash(ptx: str) -> str:
    """Return the first digits of the SHA-256 of normalized PTX."""
    return hashlib.sha256(normalize(ptx).encode()).hexdigest()[:_DIGITS]


def _compiled_ptx(
    arch: Architecture, jobs: int | None, match: str
) -> Iterator[tuple[KernelSpec, str]]:
    """Yield the PTX of matching declared kernels from the disk cache; compile what it lacks.

    Raises:
        RuntimeError: A kernel is not on disk, because the cache is off or a source was edited.
    """
    declared = dict.fromkeys(declared_specs(arch))
    specs = [spec for spec in declared if re.search(match, canonical_text(spec))]
    precompile(specs, arch=arch, jobs=jobs, load=False)
    cache = default_cache()
    for spec in specs:
        key = cache_key(spec, arch)
        files = None if cache is None or key is None else cache.load(key)
        if files is None:
            raise RuntimeError(
                f"{canonical_text(spec)} for {arch} is not in the disk cache: turn the cache on, "
                "and edit no source while this runs"
            )
        yield spec, files["ptx"].decode()


def hash_kernels(arch: Architecture, jobs: int | None = None, match: str = "") -> Hashes:
    """Return the spec texts of declared kernels of an emulated architecture by hash.

    Args:
        arch: The architecture.
        jobs: Number of processes that compile missing kernels; by default one for each CPU.
        match: Regular expression that must match in the text of a spec.
    """
    hashes: Hashes = collections.defaultdict(list)
    for spec, ptx in _compiled_ptx(arch, jobs, match):
        hashes[ptx_hash(ptx)].append(canonical_text(spec))
    return {digest: sorted(texts) for digest, texts in hashes.items()}


def collect(
    sections: tuple[str, ...] = SECTIONS, jobs: int | None = None, match: str = ""
) -> dict[str, Any]:
    """Return the content of a file, of some sections. Prints what each section has.

    Args:
        sections: Some of ``SECTIONS``.
        jobs: Number of processes that compile missing kernels; by default one for each CPU.
        match: Regular expression that must match in the spec of a kernel. Tiles are all chosen.
    """
    content: dict[str, Any] = {section: {} for section in sections}
    if "tiles" in sections:
        records = load(RESULTS)
        for arch in ARCHITECTURES:
            choices = choose(records, arch)
            content["tiles"] |= {name: group_by_tiles(group) for name, group in choices.items()}
            print(f"{arch}: tiles of {len(choices[arch])} cases. Recorded cases:")
            for outcome, count in sorted(count_recorded(records, choices[arch], arch).items()):
                print(f"{count:6} {outcome}")
    if "kernels" in sections:
        for name in ARCHITECTURES:
            target = architecture(f"emulated:{name}")
            hashes = content["kernels"][str(target)] = hash_kernels(target, jobs, match)
            total = sum(map(len, hashes.values()))
            print(f"{target}: {total} kernels, {len(hashes)} different")
    return content


def matching(content: Mapping[str, Any], match: str) -> dict[str, Any]:
    """Return the kernels and the cases of tiles of a content whose text has a match."""
    matches: dict[str, Any] = {}
    for section, groups in content.items():
        matches[section] = {}
        for group, entries in groups.items():
            if section == "kernels":
                texts = {
                    digest: [text for text in texts if re.search(match, text)]
                    for digest, texts in entries.items()
                }
                matches[section][group] = {key: value for key, value in texts.items() if value}
            else:
                matches[section][group] = {
                    case: tiles for case, tiles in entries.items() if re.search(match, case)
                }
    return matches


def _is_short(content: Mapping[str, Any]) -> bool:
    """Return True if a content has kernels, and each text is the name of a class."""
    hashes = [group for group in content.get("kernels", {}).values() if group]
    return bool(hashes) and not any(
        "(" in t for group in hashes for ts in group.values() for t in ts
    )


def _count(content: Mapping[str, Any]) -> int:
    """Return the number of hashes and cases of a content."""
    return sum(len(entries) for groups in content.values() for entries in groups.values())


def group_by_tiles(choices: Choices) -> Tiles:
    """Return the numbers of rows for which a case has each text of tiles, without empty texts."""
    tiles: Tiles = {}
    for (case, rows), text in sorted(choices.items()):
        if text:
            tiles.setdefault(case, {}).setdefault(text, []).append(rows)
    return tiles


def shortened(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a file with names of classes instead of spec texts."""
    kernels = {
        arch: {
            digest: [text.partition("(")[0].rpartition(".")[2] for text in texts]
            for digest, texts in hashes.items()
        }
        for arch, hashes in content.get("kernels", {}).items()
    }
    return {**content, "kernels": kernels} if kernels else dict(content)


def dump(content: Mapping[str, Any]) -> str:
    """Return the text of a file: sorted JSON, with one line for each kernel and each case."""
    sections = []
    for section, groups in sorted(content.items()):
        parsed = []
        for group, entries in sorted(groups.items()):
            lines = [
                f"   {json.dumps(key)}: {json.dumps(value)}"
                for key, value in sorted(entries.items())
            ]
            parsed.append(f"  {json.dumps(group)}: {{\n" + ",\n".join(lines) + "\n  }")
        sections.append(f" {json.dumps(section)}: {{\n" + ",\n".join(parsed) + "\n }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each difference between the sections that both contents have."""
    lines: list[str] = []
    for section, compare in (("kernels", _kernel_differences), ("tiles", _tile_differences)):
        if section in old and section in new:
            for group in sorted({*old[section], *new[section]}):
                sides = (old[section].get(group, {}), new[section].get(group, {}))
                lines += [f"{group}: {line}" for line in compare(*sides)]
    return lines


def _kernel_differences(old: Hashes, new: Hashes) -> Iterator[str]:
    """Compare how often each hash occurs; names play no role."""
    before, after = (
        collections.Counter({digest: len(texts) for digest, texts in hashes.items()})
        for hashes in (old, new)
    )
    for digest, count in sorted((before - after).items()):
        yield f"{count} kernel(s) with hash {digest} are missing: {'; '.join(old[digest])}"
    for digest, count in sorted((after - before).items()):
        yield f"{count} kernel(s) with hash {digest} are new: {'; '.join(new[digest])}"


def _tile_differences(old: Tiles, new: Tiles) -> Iterator[str]:
    """Compare the tiles of each case and number of rows."""
    before, after = (
        {
            (case, rows): text
            for case, groups in tiles.items()
            for text, numbers in groups.items()
            for rows in numbers
        }
        for tiles in (old, new)
    )
    for key in sorted({*before, *after}):
        old_text, new_text = before.get(key, "none"), after.get(key, "none")
        if old_text != new_text:
            yield f"tiles of {key[0]}, {key[1]} rows: {old_text} before, {new_text} now"


def _print_differences(lines: list[str], shown: int | None) -> None:
    """Print the differences, at most ``shown`` of each kind; None prints all."""
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for line in lines:
        kinds[next(kind for kind in _KINDS if kind in line)].append(line)
    for similar in kinds.values():
        print(*similar[:shown], sep="\n")
        if shown is not None and len(similar) > shown:
            print(f"... and {len(similar) - shown} more of this kind: --all prints them")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="write the file")
    action.add_argument(
        "--check", type=Path, metavar="FILE", help="print differences from a file; status 1 if any"
    )
    parser.add_argument(
        "--section", choices=SECTIONS, help="only this section; tiles need no compiled kernel"
    )
    parser.add_argument(
        "--match",
        default="",
        metavar="REGEX",
        help="only kernels whose spec, and cases of tiles whose text, has a match",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"print all differences, not only {_SHOWN} of each kind",
    )
    parser.add_argument(
        "--short", action="store_true", help="write names of classes instead of whole specs"
    )
    parser.add_argument("--jobs", type=int, help="processes that compile; default: one per CPU")


def main(options: argparse.Namespace) -> int:
    """Write or check a file and return the exit status.

    Raises:
        ValueError: Nothing matches the pattern, or the file has no whole specs to match.
    """
    old = None if options.check is None else json.loads(options.check.read_text("utf-8"))
    sections = (options.section,) if options.section else SECTIONS
    content = collect(sections, options.jobs, options.match)
    if options.match:
        if old is not None and _is_short(old):
            raise ValueError(f"{options.check} was written with --short: --match needs whole specs")
        content = matching(content, options.match)
        old = None if old is None else matching(old, options.match)
        if not _count(content) and not _count(old or {}):
            raise ValueError(f"no kernel or case of tiles matches --match {options.match!r}")
        print(f"{_count(content)} kernels and cases match {options.match!r}")
    if old is None:
        text = dump(shortened(content) if options.short else content)
        options.write.write_text(text, "utf-8")
        return 0
    lines = differences(old, content)
    _print_differences(lines, None if options.all else _SHOWN)
    print(f"{len(lines)} differences from {options.check}", file=sys.stderr)
    return 1 if lines else 0
