"""Preferences among the legal tiles of sm_100a.

Legality is in ``config``, the model of time in ``cost_model``. There are no measurements: no B200
has run the kernels yet.
"""

from collections.abc import Iterator

from cute_kernels.capability import Support

from ..common.rules import Rule, check_rules
from .config import EPILOGUE_WARPS, Sm100GemmConfig, Sm100Tile


def prefers(config: Sm100GemmConfig, tile: Sm100Tile) -> Support:
    """Return whether the choice of a tile considers ``tile``, and if not, why.

    A tile of ``config.tile_shapes`` that the configuration cannot have is not considered either.
    """
    if reason := config.why_unsupported(tile):
        return Support(False, reason)
    return check_rules(_preferences(config, tile))


def _preferences(config: Sm100GemmConfig, tile: Sm100Tile) -> Iterator[Rule]:
    """Yield what a legal tile is preferred for."""
    # With swapped operands, instructions are as narrow as the rows of a group. Other tiles multiply
    # up to a tile of rows for each group that no group has. They are considered where swapping is
    # not possible, or where tiles with swapped operands do not hold whole blocks of the output.
    can_swap = (
        config.grouping == "m_grouped"
        and len(config.codes) < 2
        and not config.promotes
        and config.sharing_warps <= EPILOGUE_WARPS
    )
    yield Rule(
        tile.may_swap or not can_swap,
        "tile",
        tile,
        "tiles whose operands can be swapped multiply fewer empty rows",
    )


def prefers_activation(config: Sm100GemmConfig, num_rows: int, before_quantizer: bool) -> bool:
    """Return True: the epilogue of a product applies the activation wherever it can.

    The arguments are those of ``sm90.choose.prefers_activation``.
    """
    return True
