"""Activations in epilogues: from vectors that are staged in shared memory into the output."""

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, Uint32, cute

from cute_kernels.device.activation_curves import activated_by_magnitude
from cute_kernels.device.convert import pack_words, unpack_words
from cute_kernels.device.ptx import asm, asm_volatile

from .config import GemmConfig
from .operand_kinds import DTYPE_BYTES
from .output_store import VECTOR_BYTES, EpilogueTensors, out_offset


def load_if(
    address: Int64, count: int, rows: tuple[Int32, int], cols: tuple[Int32, int]
) -> list[Uint32]:
    """Load 2 or 4 words if there are more rows and more columns than given, else return zeros.

    It never branches.

    Args:
        address: Address in global memory.
        count: Number of words.
        rows: Number of rows, and the number that it must exceed.
        cols: Number of columns, and the number that it must exceed.
    """
    names = [f"${i}" for i in range(count)]
    text = f"""{{
        .reg .pred p;
        setp.gt.s32 p, ${count + 1}, {rows[1]};
        setp.gt.and.s32 p, ${count + 2}, {cols[1]}, p;
        {" ".join(f"mov.b32 {name}, 0;" for name in names)}
        @p ld.global.v{count}.b32 {{{", ".join(names)}}}, [${count}];
        }}"""
    return list(asm(text, [Uint32] * count, [address, rows[0], cols[0]]))


def store_if(
    address: Int64, words: list[Uint32], rows: tuple[Int32, int], cols: tuple[Int32, int]
) -> None:
    """Store 4, 8 or 16 bytes if there are more rows and more columns than given; never branch.

    The arguments are those of ``load_if``.
    """
    count = len(words)
    names = ", ".join(f"${i + 1}" for i in range(count))
    asm_volatile(
        f"""{{
        .reg .pred p;
        setp.gt.s32 p, ${count + 1}, {rows[1]};
        setp.gt.and.s32 p, ${count + 2}, {cols[1]}, p;
        @p st.global{f".v{count}" * (count > 1)}.b32 [$0], {{{names}}};
        }}""",
        [address, *words, rows[0], cols[0]],
    )


class Target(NamedTuple):
    """Address of the first vector of a thread in a tensor.

    Attributes:
        address: Address in global memory.
        pitch: Bytes from one row to the next.
    """

    address: Int64
    pitch: Int64

    @classmethod
    def locate(
        cls, config: GemmConfig, x: cute.Tensor, group: Int32, row: Int32, col: Int32
    ) -> "Target":
        """Return the target at a row and a column of a group in ``x``, (1, T, N) or (G, M, N)."""
        width = x.element_type.width // 8
        offset = out_offset(config, x, group, row, col)
        return cls(x.iterator.toint() + offset * width, Int64(x.stride[1]) * width)

    def address_at(self, row: int, offset: int) -> Int64:
        """Return the address ``row`` rows and ``offset`` bytes further."""
        return self.address + self.pitch * row + offset

    def moved(self, row: Int32, offset: Int32) -> "Target":
        """Return the target ``row`` rows and ``offset`` bytes further."""
        return Target(self.address_at(row, offset), self.pitch)


class Window(NamedTuple):
    """Destination of a thread's vectors of a tile.

    Attributes:
        out: Target of the tile's first block in the output.
        z: Targets in the stored preactivation. Two if it has halves A and B.
        rows: Rows that exist from the first vector on.
        cols: Columns of the product that exist from the first vector on.
    """

    out: Target
    z: list[Target]
    rows: Int32
    cols: Int32

    @classmethod
    def locate(
        cls,
        config: GemmConfig,
        tensors: EpilogueTensors,
        group: Int32,
        row: Int32,
        col: Int32,
        rows: Int32,
    ) -> "Window":
        """Return the window of the vector at ``row`` and ``col`` of the product.

        ``rows`` rows exist from that row on.
        """
        out, z = tensors.out, tensors.z
        cols, narrow = tensors.columns(config), col
        if config.is_gated:
            cols, narrow = 2 * cols, col // 2
        starts: list[Any] = []
        if z is not None:
            starts = [narrow, narrow + out.shape[2]] if config.interleaves_halves else [col]
        targets = [Target.locate(config, z, group, row, start) for start in starts]
        return cls(
            Target.locate(config, out, group, row, narrow // config.per_element),
            targets,
            rows,
            cols - col,
        )

    def moved(self, row: Int32, col: Int32, width: int, halves: int) -> "Window":
        """Return the window ``row`` and ``col`` further, for elements of ``width`` bytes."""
        narrow = col // halves * width
        z_offset = narrow if len(self.z) > 1 else col * width
        z = [target.moved(row, z_offset) for target in self.z]
        return Window(self.out.moved(row, narrow), z, self.rows - row, self.cols - col)


def activation_inputs(config: GemmConfig, vectors: list[list[Uint32]]) -> list[list[Float32]]:
    """Return x, or A and B, as fp32 numbers.

    Args:
        config: Configuration of the kernel.
        vectors: Words of vectors that follow each other in a row of the product.
    """
    numbers = [number for words in vectors for number in unpack_words(words, config.out_dtype)]
    halves = 1 + config.is_gated
    return [numbers[half::halves] for half in range(halves)]


def store_activated(
    config: GemmConfig,
    vectors: list[list[Uint32]],
    window: Window,
    positions: list[tuple[int, int]],
) -> None:
    """Apply the activation to vectors of the product, and store the results.

    Args:
        config: Configuration of the kernel.
        vectors: Words of the vectors.
        window: Destination of the vectors.
        positions: Row and column of each vector in the window.
    """
    dtype, halves = config.out_dtype, 1 + config.is_gated
    inputs = activation_inputs(config, vectors)
    activated, width = apply_activation(config, inputs), DTYPE_BYTES[dtype]
    count = VECTOR_BYTES // width // halves
    for i, (words, (row, col)) in enumerate(zip(vectors, positions, strict=True)):
        limits = (window.rows, row), (window.cols, col)
        offset, span = col * width, slice(i * count, (i + 1) * count)
        targets = [(window.out, activated[span])]
        if len(window.z) == halves > 1:
            targets += [(target, half[span]) for target, half in zip(window.z, inputs, strict=True)]
        elif window.z:
            store_if(window.z[0].address_at(row, offset), words, *limits)
        for target, numbers in targets:
            store_if(target.address_at(row, offset // halves), pack_words(numbers, dtype), *limits)


def apply_activation(config: GemmConfig, inputs: list[list[Float32]]) -> list[Float32]:
    """Return the activation of x, or of A and B, one number for each."""
    act: Any = config.act
    activated: list[Float32] = activated_by_magnitude(act, False, config.arch, inputs)[0]
    return activated
