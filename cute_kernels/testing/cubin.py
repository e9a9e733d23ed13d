"""Resources of kernels, read from their cubin: registers, and stack bytes, which include spills."""

import dataclasses
import struct

# Attributes of .nv.info whose value is (symbol, number).
_REGISTERS, _FRAME_SIZE = 0x2F, 0x11
_SIZED = 4
_STT_FUNC = 2


@dataclasses.dataclass
class Resources:
    """Resources per thread of a function; functions that are not kernels have 0 registers."""

    registers: int = 0
    stack_bytes: int = 0


def read_resources(cubin: bytes) -> dict[str, Resources]:
    """Return the resources of all functions of a 64-bit cubin, by name.

    Raises:
        ValueError: ``cubin`` is not an ELF file.
    """
    if cubin[:4] != b"\x7fELF":
        raise ValueError("a cubin is an ELF file; this is not one")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # name, type, flags, address, offset, size, link, info, alignment, entry size
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]

    def text(strings: int, offset: int) -> str:
        start = headers[strings][4] + offset
        return cubin[start : cubin.index(b"\0", start)].decode()

    sections = {text(names, header[0]): header for header in headers}
    symbols = sections[".symtab"]
    functions = {}
    for i in range(symbols[5] // 24):
        name, info = struct.unpack_from("<IB", cubin, symbols[4] + i * 24)
        if info & 15 == _STT_FUNC:
            functions[i] = text(symbols[6], name)
    resources_by_name = {name: Resources() for name in functions.values()}
    position = sections[".nv.info"][4]
    end = position + sections[".nv.info"][5]
    while position < end:
        kind, attribute, length = struct.unpack_from("<BBH", cubin, position)
        position += 4
        if kind != _SIZED:
            continue
        if attribute in (_REGISTERS, _FRAME_SIZE):
            symbol, value = struct.unpack_from("<II", cubin, position)
            resources = resources_by_name[functions[symbol]]
            if attribute == _REGISTERS:
                resources.registers = value
            else:
                resources.stack_bytes = value
        position += length
    return resources_by_name
