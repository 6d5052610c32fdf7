"""What all sections of a configuration are made of."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

Count = Annotated[int, Field(ge=1, strict=True)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Minutes = Annotated[float, Field(gt=0, le=100_000)]  # Python can wait no longer than some hundred years
Switch = Annotated[bool, Field(strict=True)]
Layers = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(lambda value: _split(value))]


def _split(value: Any) -> Any:
    """`7,9` as [7, 9], and one number as a list of one."""
    if isinstance(value, str):
        return value.split(",")
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


class Section(BaseModel):
    """Base of all sections: no unknown keys, immutable after validation; numbers are finite and no truth values."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take `true` for 1."""
        types = _types_in(cls.model_fields[info.field_name or ""].annotation)
        if types & {int, float} and bool not in types:
            given = value if isinstance(value, list) else [value]
            if any(isinstance(item, bool) for item in given):
                raise ValueError("should be a number, not a truth value")
        return value


def _types_in(annotation: Any) -> set[Any]:
    """A type, or those of a union or list."""
    parts = get_args(annotation)
    return set().union(*map(_types_in, parts)) if parts else {annotation}
