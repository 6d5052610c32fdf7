"""Rules on the Ray cluster."""

from __future__ import annotations

from mindspeed_rl.common.errors import Violation
from mindspeed_rl.config.rule import Found, rule
from mindspeed_rl.config.schema import Config

_OF_OURS = ("object_store_gib", "spill_folder")


@rule("ray_address", *(f"ray.{key}" for key in _OF_OURS))
def ray_keys_act_on_a_ray_of_ours(cfg: Config) -> Found:
    """The memory of a cluster is settled when its nodes start."""
    if cfg.ray_address is not None:
        yield from without_effect_on(cfg, cfg.ray_address)


def without_effect_on(cfg: Config, address: str | None) -> Found:
    """Keys that are set and change nothing with a cluster at `address`, or, with None, with a Ray started here."""
    if address is None:
        if cfg.ray.nodes_timeout_minutes:
            message = "has no effect on a Ray started here: no nodes join it"
            yield Violation("ray.nodes_timeout_minutes", cfg.ray.nodes_timeout_minutes, message, "set ray_address")
        return
    options = {"object_store_gib": "--object-store-memory", "spill_folder": "--object-spilling-directory"}
    for key in _OF_OURS:
        if (value := getattr(cfg.ray, key)) is not None:
            message = f"has no effect on the cluster at {address}, which runs already"
            yield Violation(f"ray.{key}", value, message, f"remove it; `ray start` takes {options[key]}")
