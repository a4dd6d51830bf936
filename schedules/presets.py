"""Shapes of models in use, by ``MODEL/PROJECTION``: n and k of one rank.

Kimi-K3's are the local sizes published for TP8, and stay so at any TP, as in the published tables.
The others are a model's whole projection, whose n is divided by TP.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.schedules.language import InvalidInput, UnknownName, ceil_div

__all__ = ["PRESETS", "Projection", "preset_names", "projection"]


@dataclass(frozen=True, slots=True)
class Projection:
    """One projection of a model.

    Attributes
    ----------
    n, k
        Output and input columns: of one rank, or of the whole projection if `whole`.
    whole
        Whether n is to be divided by TP.
    source
        Where the figure comes from.
    """

    n: int
    k: int
    whole: bool
    source: str


_VLLM = "vLLM pull request 54151 (TP8)"
_CONFIG = "the model's public config.json"

PRESETS: dict[str, Projection] = {
    "kimi-k3/kda": Projection(6288, 7168, False, _VLLM),
    "kimi-k3/mla": Projection(3648, 7168, False, _VLLM),
    "deepseek-v3/dense-gate-up": Projection(36864, 7168, True, _CONFIG),
    "llama-3.1-70b/qkv": Projection(10240, 8192, True, _CONFIG),
    "llama-3.1-70b/gate-up": Projection(57344, 8192, True, _CONFIG),
    "llama-3.1-405b/qkv": Projection(18432, 16384, True, _CONFIG),
    "llama-3.1-405b/gate-up": Projection(106496, 16384, True, _CONFIG),
    "qwen3-32b/qkv": Projection(10240, 5120, True, _CONFIG),
    "qwen3-32b/gate-up": Projection(51200, 5120, True, _CONFIG),
}


def preset_names() -> tuple[str, ...]:
    """Return the names that `projection` knows."""
    return tuple(PRESETS)


def projection(name: str, tp: int) -> tuple[int, int]:
    """Return n and k of one rank for ``MODEL/PROJECTION`` at `tp`.

    Raises
    ------
    UnknownName
        If there is no such preset.
    InvalidInput
        If the name is a model alone.
    """
    found = PRESETS.get(name.lower())
    if found is None:
        models = {preset.split("/")[0] for preset in PRESETS}
        if name.lower() in models:
            choices = [preset for preset in PRESETS if preset.startswith(name.lower() + "/")]
            raise InvalidInput(f"Name a projection of {name}: {', '.join(choices)}.")
        raise UnknownName("preset", name, preset_names())
    return (ceil_div(found.n, tp) if found.whole else found.n), found.k
