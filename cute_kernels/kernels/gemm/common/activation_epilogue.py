"""Products through an activation: vectors that an epilogue passed through shared memory, into the
output.
"""

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
    """Load 2 or 4 words if there are more rows and more columns than given, else zeros; never a
    branch.
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
    """Store 4, 8 or 16 bytes if there are more rows and more columns than given; never a branch."""
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
    """Where the first vector of a thread goes in a tensor, and bytes from one row to the next."""

    address: Int64
    pitch: Int64

    @classmethod
    def of(
        cls, config: GemmConfig, x: cute.Tensor, group: Int32, row: Int32, col: Int32
    ) -> "Target":
        width = x.element_type.width // 8
        offset = out_offset(config, x, group, row, col)
        return cls(x.iterator.toint() + offset * width, Int64(x.stride[1]) * width)

    def at(self, row: int, offset: int) -> Int64:
        """The address ``row`` rows and ``offset`` bytes further."""
        return self.address + self.pitch * row + offset

    def moved(self, row: Int32, offset: Int32) -> "Target":
        return Target(self.at(row, offset), self.pitch)


class Window(NamedTuple):
    """What a thread's vectors of a tile become, of which ``rows`` and ``cols`` exist from the first
    one on.

    ``out`` is the place of the tile's first block, ``z`` that in what goes into an activation, for
    A and B if halves.
    """

    out: Target
    z: list[Target]
    rows: Int32
    cols: Int32

    @classmethod
    def of(
        cls,
        config: GemmConfig,
        tensors: EpilogueTensors,
        group: Int32,
        row: Int32,
        col: Int32,
        rows: Int32,
    ) -> "Window":
        """That of the vector at a row and a column of the product, from which on there are ``rows``
        rows.
        """
        out, z = tensors.out, tensors.z
        cols, narrow = tensors.columns(config), col
        if config.is_gated:
            cols, narrow = 2 * cols, col // 2
        starts: list[Any] = []
        if z is not None:
            starts = [narrow, narrow + out.shape[2]] if config.interleaves_halves else [col]
        targets = [Target.of(config, z, group, row, start) for start in starts]
        return cls(
            Target.of(config, out, group, row, narrow // config.per_element),
            targets,
            rows,
            cols - col,
        )

    def moved(self, row: Int32, col: Int32, width: int, halves: int) -> "Window":
        """That of a block ``row`` and ``col`` further, of elements of ``width`` bytes."""
        narrow = col // halves * width
        of_z = narrow if len(self.z) > 1 else col * width
        z = [target.moved(row, of_z) for target in self.z]
        return Window(self.out.moved(row, narrow), z, self.rows - row, self.cols - col)


def inputs_of(config: GemmConfig, vectors: list[list[Uint32]]) -> list[list[Float32]]:
    """x, or A and B, of vectors that follow each other in a row of the product."""
    numbers = [number for words in vectors for number in unpack_words(words, config.out_dtype)]
    halves = 1 + config.is_gated
    return [numbers[half::halves] for half in range(halves)]


def store_activated(
    config: GemmConfig, vectors: list[list[Uint32]], window: Window, places: list[tuple[int, int]]
) -> None:
    """Store what an activation makes of vectors at rows and columns of the product."""
    dtype, halves = config.out_dtype, 1 + config.is_gated
    inputs = inputs_of(config, vectors)
    made, width = apply(config, inputs), DTYPE_BYTES[dtype]
    count = VECTOR_BYTES // width // halves
    for i, (words, (row, col)) in enumerate(zip(vectors, places, strict=True)):
        limits = (window.rows, row), (window.cols, col)
        offset, own = col * width, slice(i * count, (i + 1) * count)
        targets = [(window.out, made[own])]
        if len(window.z) == halves > 1:
            targets += [(target, half[own]) for target, half in zip(window.z, inputs, strict=True)]
        elif window.z:
            store_if(window.z[0].at(row, offset), words, *limits)
        for target, some in targets:
            store_if(target.at(row, offset // halves), pack_words(some, dtype), *limits)


def apply(config: GemmConfig, inputs: list[list[Float32]]) -> list[Float32]:
    """What the activation makes of x, or of A and B, as many numbers each."""
    act: Any = config.act
    return activated_by_magnitude(act, False, config.arch, inputs)[0]  # type: ignore[no-any-return]
