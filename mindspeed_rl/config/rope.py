"""Rotary position embeddings: their base and scaling, as Hugging Face's `config.json` files state them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = (_ORIGINAL, "low_freq_factor", "high_freq_factor")
_YARN = (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# rope_type -> the keys that it has beside `factor`, and those of them that it cannot do without
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "llama3": (_LLAMA3, _LLAMA3),
    "yarn": (_YARN, (_ORIGINAL,)),
}


class RopeScaling(BaseModel):
    """How rotary frequencies are stretched for sequences longer than those of pretraining; Hugging Face's keys.

    Immutable. What the keys mean in numbers: `engine/megatron/rotary.py`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rope_type: Literal["linear", "llama3", "yarn"] = Field(description="method")
    factor: float = Field(ge=1, description="low frequencies (`linear`: all) are divided by it")
    original_max_position_embeddings: PositiveInt | None = Field(
        None, description="`llama3`, `yarn`: longest sequence of pretraining, in tokens"
    )
    low_freq_factor: PositiveFloat | None = Field(
        None, description="`llama3`: frequencies with fewer turns in the original length are divided by `factor`"
    )
    high_freq_factor: PositiveFloat | None = Field(
        None, description="`llama3`: frequencies with more turns in the original length stay as they are"
    )
    attention_factor: PositiveFloat | None = Field(
        None, description="`yarn`: multiplies cosines and sines; null: from `factor`, or from `mscale`s"
    )
    beta_fast: PositiveFloat = Field(
        32.0, description="`yarn`: frequencies with more turns in the original length stay as they are"
    )
    beta_slow: PositiveFloat = Field(
        1.0, description="`yarn`: frequencies with fewer turns in the original length are divided by `factor`"
    )
    mscale: PositiveFloat | None = Field(
        None, description="`yarn`: with `mscale_all_dim`, numerator of what multiplies cosines and sines"
    )
    mscale_all_dim: PositiveFloat | None = Field(None, description="`yarn`: the denominator")
    truncate: bool = Field(True, description="`yarn`: the bounds of `beta_fast`, `beta_slow` are whole dimensions")

    @model_validator(mode="after")
    def _check_keys(self) -> RopeScaling:
        used, needed = _KEYS[self.rope_type]
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in needed and value is None:
                raise ValueError(f"{name} is needed with rope_type = {self.rope_type!r}")
            if name not in ("rope_type", "factor", *used) and value != field.default:
                raise ValueError(f"{name} = {value!r} has no meaning with rope_type = {self.rope_type!r}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and low >= high:
            raise ValueError(f"low_freq_factor = {low!r} is not below high_freq_factor = {high!r}")
        if self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow = {self.beta_slow!r} is above beta_fast = {self.beta_fast!r}")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"mscale = {self.mscale!r}, mscale_all_dim = {self.mscale_all_dim!r}: set both or neither"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError(f"mscale = {self.mscale!r} would be ignored: attention_factor is set, too")
        return self

    @property
    def yarn_length(self) -> float | None:
        """Longest sequence that YaRN reaches, in tokens, for which vLLM tabulates it; None with another method."""
        original = self.original_max_position_embeddings
        return original * self.factor if original and self.rope_type == "yarn" else None

    def __repr_args__(self) -> list[tuple[str | None, Any]]:
        return [(key, value) for key, value in self if value != type(self).model_fields[key].default]


def rope_from_hf(hf: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding from the contents of a `config.json`.

    transformers 5 nests all settings in `rope_parameters`. Older files have the base at the top level, and scaling in
    `rope_scaling`, its method under `type` or `rope_type`. Where no original length is given, it is
    `max_position_embeddings`, as in transformers.

    Raises:
        ValueError: a setting that is not supported, or two that contradict each other; names key and value.
    """
    name, rope = _settings(hf)
    base = rope.pop("rope_theta", hf.get("rope_theta", 10000.0))
    partial = rope.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor = {partial!r} is not supported (only 1.0)")
    kind = rope["rope_type"]
    if kind not in ("default", *_KEYS):
        raise ValueError(f"rope_type = {kind!r} is not supported (only 'default', {str([*_KEYS])[1:-1]})")
    for key, value in rope.items():
        if key not in (RopeScaling.model_fields if kind != "default" else ("rope_type", _ORIGINAL)):
            raise ValueError(f"{name}.{key} = {value!r} is not supported with rope_type = {kind!r}")
    if kind == "default":
        return base, None
    if _ORIGINAL in _KEYS[kind][0]:
        rope.setdefault(_ORIGINAL, hf["max_position_embeddings"])
        outer = hf.get(_ORIGINAL, rope[_ORIGINAL])
        if outer != rope[_ORIGINAL]:  # transformers takes the one or the other, depending on when it looks
            raise ValueError(f"{_ORIGINAL} = {outer!r} is not {name}.{_ORIGINAL} = {rope[_ORIGINAL]!r}: set that one")
    try:
        return base, RopeScaling(**rope)
    except ValidationError as error:
        found = [(".".join(map(str, (name, *item["loc"]))), item["input"], item["msg"]) for item in error.errors()]
        raise ValueError("; ".join(f"{key} = {value!r}: {message}" for key, value, message in found)) from error


def _settings(hf: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the section with the rope settings, and what it says; null means that a key is not there."""
    nested, old = hf.get("rope_parameters"), hf.get("rope_scaling")
    if nested and old and nested != old:
        raise ValueError(f"rope_parameters = {nested!r} and rope_scaling = {old!r} are both set: keep one")
    rope = {key: value for key, value in (nested or old or {}).items() if value is not None}
    kind = rope.pop("type", None)
    if rope.setdefault("rope_type", kind or "default") != (kind or rope["rope_type"]):
        raise ValueError(f"rope_type = {rope['rope_type']!r} and type = {kind!r} are both set: keep one")
    return "rope_parameters" if nested else "rope_scaling", rope
