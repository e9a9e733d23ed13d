"""Vector loads and stores at plain addresses, and bulk copies.

Addresses are integers: 32-bit byte offsets into shared memory, 64-bit global addresses. Vectors are
lists of 32-bit words.
"""

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, Int64, Uint8, Uint16, Uint32, Uint64, cute

from .ptx import asm, asm_volatile, select


def _words_at(address: Int32 | Int64, words: int, space: cute.AddressSpace) -> cute.Tensor:
    """Return a view of ``words`` aligned words at an address."""
    pointer = cute.make_ptr(Uint32, address, space, assumed_align=4 * words)
    return cute.make_tensor(pointer, cute.make_layout(words))


def _load(address: Int32 | Int64, words: int, space: cute.AddressSpace) -> list[Uint32]:
    """Load ``words`` words in one instruction."""
    out = cute.make_rmem_tensor(words, Uint32)
    cute.autovec_copy(_words_at(address, words, space), out)
    return [out[i] for i in range(words)]


def _store(address: Int32 | Int64, values: Sequence[Uint32], space: cute.AddressSpace) -> None:
    """Store words in one instruction."""
    source = cute.make_rmem_tensor(len(values), Uint32)
    for i, value in enumerate(values):
        source[i] = value
    cute.autovec_copy(source, _words_at(address, len(values), space))


def load_shared(address: Int32, words: int) -> list[Uint32]:
    """Load 1, 2 or 4 words from an aligned shared address, in one instruction."""
    return _load(address, words, cute.AddressSpace.smem)


def store_shared(address: Int32, values: Sequence[Uint32]) -> None:
    """Store 1, 2 or 4 words at an aligned shared address, in one instruction."""
    _store(address, values, cute.AddressSpace.smem)


def load_global(address: Int64, words: int) -> list[Uint32]:
    """Load 1, 2, 4 or 8 words from an aligned global address, in one instruction."""
    return _load(address, words, cute.AddressSpace.gmem)


def load_global_if(address: Int64, num_bytes: int, index: Int32, end: Int32) -> list[Uint32]:
    """Load 2, 4, 8 or 16 aligned bytes if ``index < end``, else return zeros.

    The kernel must never write these bytes. There is no branch, so many loads can be in flight at
    once. Two bytes come as the low half of a word.
    """
    words = max(1, num_bytes // 4)
    address_at, index_at, end_at = words, words + 1, words + 2
    names = [f"${i}" for i in range(words)]
    head = f".reg .pred in; setp.lt.s32 in, ${index_at}, ${end_at};"
    if num_bytes == 2:
        body = f".reg .b16 h; mov.b16 h, 0; @in ld.global.nc.b16 h, [${address_at}]; "
        body += "cvt.u32.u16 $0, h;"
    else:
        body = " ".join(f"mov.b32 {name}, 0;" for name in names)
        vector = f".v{words}.b32 {{{', '.join(names)}}}" if words > 1 else ".b32 $0"
        body += f" @in ld.global.nc{vector}, [${address_at}];"
    out = asm(f"{{ {head} {body} }}", [Uint32] * words, [address, index, end])
    return [out] if words == 1 else list(out)


def store_global(address: Int64, values: Sequence[Uint32]) -> None:
    """Store 1, 2, 4 or 8 words at an aligned global address, in one instruction."""
    _store(address, values, cute.AddressSpace.gmem)


def store_global_pair(address: Int64, offset: int, value: Uint64) -> None:
    """Store two words ``offset`` bytes after an aligned global address."""
    asm_volatile(f"st.global.b64 [$0+{offset}], $1;", [address, value])


def store_global_past_l1(address: Int64, values: Sequence[Uint32]) -> None:
    """Store words at an aligned global address without allocating in L1.

    The compiler does not move the store. It takes 1, 2 or 4 words, and 8 on sm_100a. On an H200
    tile quantizers are 1 to 2 % faster with it.
    """
    count = len(values)
    names = ", ".join(f"${i + 1}" for i in range(count))
    operands = f".v{count}.b32 [$0], {{{names}}}" if count > 1 else ".b32 [$0], $1"
    asm_volatile(f"st.global.L1::no_allocate{operands};", [address, *values])


def _store_low(
    address: Int32 | Int64, value: Uint32, dtype: type, space: cute.AddressSpace
) -> None:
    """Store the low bits of ``value`` as ``dtype``."""
    pointer = cute.make_ptr(dtype, address, space)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value.to(dtype)


def store_global_half(address: Int64, value: Uint32) -> None:
    """Store the low 16 bits of ``value`` at an even global address."""
    _store_low(address, value, Uint16, cute.AddressSpace.gmem)


def store_global_byte(address: Int64, value: Uint32) -> None:
    """Store the low byte of ``value``."""
    _store_low(address, value, Uint8, cute.AddressSpace.gmem)


def store_shared_half(address: Int32, value: Uint32) -> None:
    """Store the low 16 bits of ``value`` at an even shared address."""
    _store_low(address, value, Uint16, cute.AddressSpace.smem)


def transpose_four(words: Sequence[Uint32], distance: int) -> list[Uint32]:
    """Exchange words among four lanes ``distance`` (1 to 8) apart.

    Lane q gets word q of each of the four lanes. All lanes of the warp must take part.
    """
    lane = cute.arch.lane_idx()
    words = list(words)
    for step in (1, 2):
        upper = lane // (distance * step) % 2 != 0
        out = list(words)
        for low in (i for i in range(4) if i // step % 2 == 0):
            high = low + step
            # Exchange this lane's word of the other half with the other lane's word of this half.
            sent = select(upper, words[low], words[high])
            received = Uint32(cute.arch.shuffle_sync_bfly(sent, offset=distance * step))
            out[low] = select(upper, received, words[low])
            out[high] = select(upper, words[high], received)
        words = out
    return words


def store_shared_byte(address: Int32, value: Uint32) -> None:
    """Store the low byte of ``value``."""
    _store_low(address, value, Uint8, cute.AddressSpace.smem)


def wait_each(mbar: cute.Pointer, parity: Int32) -> None:
    """Wait for a barrier that may differ between lanes.

    ``cute.arch.mbarrier_wait`` sleeps until one barrier completes, or 10 ms. If lanes wait for
    different barriers, that can be the wrong one, so here the sleep is short.
    """
    asm_volatile(
        """{
		.reg .pred done;
		WAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1, 200;
		@!done bra WAIT;
		}""",
        [Int32(mbar.toint()), parity],
    )


def copy_async(shared: Int32, source: Int64, is_valid: Any) -> None:
    """Start a copy of 16 bytes to shared memory. It writes zeros unless ``is_valid``."""
    size = Int32(select(is_valid, Uint32(16), Uint32(0)))
    asm_volatile("cp.async.cg.shared.global [$0], [$1], 16, $2;", [shared, source, size])


def bulk_load(shared: Int32, source: Int64, num_bytes: Int32, mbar: cute.Pointer) -> None:
    """Start a bulk copy from global to shared memory. Its bytes count on ``mbar``.

    Every calling thread starts one copy. Addresses and size are multiples of 16 bytes.
    """
    asm_volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        [shared, source, num_bytes, Int32(mbar.toint())],
    )
