"""Declarations of quantized inputs in the configuration files of a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import quantization_sections
from .files import CONFIG, MODELOPT_CONFIG, read_json


def declares_quantized_inputs(folder: Path) -> bool:
    """Return True if a checkpoint declares that inputs are quantized, and not weights alone.

    Args:
        folder: A folder that ``check_config`` accepts.
    """
    sections = [section for _, section in quantization_sections(read_json(folder / CONFIG))]
    modelopt = read_json(folder / MODELOPT_CONFIG).get("quantization")
    return any(map(_quantizes_inputs, sections or ([modelopt] if modelopt else [])))


def _quantizes_inputs(section: Mapping[str, Any]) -> bool:
    """Return True if one quantization config declares quantized inputs."""
    groups = section.get("config_groups")
    if groups:
        # A preset in place of a group is a list of modules, and its name is that of the scheme.
        return any(
            bool(group.get("input_activations"))
            if isinstance(group, Mapping)
            else not name.endswith("A16")
            for name, group in groups.items()
        )
    if "activation_scheme" in section:
        return True
    algo = section.get("quant_algo")
    return isinstance(algo, str) and "A16" not in algo.upper()
