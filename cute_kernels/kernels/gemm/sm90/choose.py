"""Preferences among the legal tiles of sm_90a, and the measurements that say so.

Legality is in ``config``, the model of time in ``cost_model``.
"""

from collections.abc import Iterator

from cute_kernels.capability import Support

from ..common.rules import Rule, check_rules
from .config import DECODED_N, WIDE_N, Sm90GemmConfig, Sm90Tile, balances_rows

#: Rows below which a product whose operands are decoded leaves the activation to the quantizer
#: that follows: see ``prefers_activation``.
_MANY_ROWS = 1024


def prefers(config: Sm90GemmConfig, tile: Sm90Tile) -> Support:
    """Return whether the choice of a tile considers ``tile``, and if not, why.

    A tile of ``config.tile_shapes`` that the configuration cannot have is not considered either.
    """
    if reason := config.why_unsupported(tile):
        return Support(False, reason)
    return check_rules(_preferences(config, tile))


def _preferences(config: Sm90GemmConfig, tile: Sm90Tile) -> Iterator[Rule]:
    """Yield what a legal tile is preferred for. Each comment has the measurement."""
    yield Rule(
        config.gathered or (tile.m, tile.n, tile.num_ctas) != (256, 128, 1),
        "num_ctas",
        tile.num_ctas,
        "a tile of 256 x 128 in one CTA is for products that gather rows",
    )
    # 256 x 256 takes 3 to 5% longer than 256 x 128 at 512 and 4096 rows per group (H200).
    yield Rule(
        not (config.is_decoded and tile.swap_ab) or tile.n <= WIDE_N,
        "n",
        tile.n,
        f"decoded operands have tiles of at most {WIDE_N} columns",
    )
    yield Rule(
        config.is_decoded or tile.n != DECODED_N and (not tile.row_fitted or tile.n > WIDE_N),
        "n",
        tile.n,
        f"row-fitted tiles of up to {WIDE_N} columns, and tiles of {DECODED_N}, are for operands "
        "that are decoded",
    )
    if balances_rows(tile):
        # Never timed. FP8Block took 15 to 40% longer in such tiles of 128 rows (H200).
        has_options = config.activation is not None or config.gathered
        yield Rule(
            not (config.kind.has_short_sums and has_options),
            "n",
            tile.n,
            f"products of {config.operand} that gather rows or activate do not balance tiles",
        )
    # A tile of 128 x 256 in one CTA takes 320 us where two CTAs, which wait for each other's
    # stages, take 403 us (H200).
    yield Rule(
        config.activation is None or not config.promotes or tile.num_ctas == 1,
        "num_ctas",
        tile.num_ctas,
        "products that promote sums and activate have one CTA per tile",
    )


def prefers_activation(config: Sm90GemmConfig, num_rows: int, before_quantizer: bool) -> bool:
    """Return True if the epilogue of a product should apply the activation.

    Args:
        config: Configuration of the product with the activation, with any tile.
        num_rows: Rows of the product.
        before_quantizer: True if a quantizer follows that could apply the activation as well.

    The epilogue takes the shared memory of a stage. With decoded operands and few rows that costs
    more than it gains. Layers of DeepSeek-V3's experts with 128 and 512 rows each took 10 and 7%
    longer. Layers of Qwen3's experts with 256 rows took 2% longer, and with 2048 rows 9% less. In
    FP8Block they took 1% longer to 9% less (H200). The result is quantized in the epilogue only
    where that was timed.
    """
    if before_quantizer and config.is_decoded and num_rows < _MANY_ROWS:
        return False
    return config.result is None or config.kind.has_row_scales
