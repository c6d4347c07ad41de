"""What may stand at a place of the config: read once from the type annotations.

Everything else here (loading, writing, the reference) asks this module and never looks at an annotation.
"""

from __future__ import annotations

import collections.abc as abc
import enum
import types
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, NewType, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    JsonValue,
    PlainValidator,
    WrapValidator,
)
from pydantic.fields import FieldInfo

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the root to a value."""

_ARRAYS = (list, tuple, set, frozenset, abc.Sequence, abc.Set)
_TABLES = (dict, abc.Mapping)


@dataclass(frozen=True)
class Shape:
    """The alternatives at one place. More than one may be open: `int | Limits | None` is a union."""

    sections: tuple[type[BaseModel], ...] = ()
    tag: str | None = None
    """The key that tells several `sections` apart."""
    item: Shape | None = None
    """What an array holds, if an array may stand here."""
    values: Shape | None = None
    """What a free table (`dict[str, X]`) holds, if one may stand here."""
    scalars: tuple[Any, ...] = ()
    """Types of plain values: `int`, `Path`, `Literal["a", "b"]`, an enum."""
    nullable: bool = False
    opaque: bool = False
    """`Any`: whatever the file says."""
    converts: bool = False
    """A validator runs before the type check, so the type does not tell what may be written."""
    bounds: tuple[Any, ...] = ()
    """Constraints, as pydantic keeps them: `Ge`, `Lt`, `MinLen`..."""

    @property
    def members(self) -> dict[str, type[BaseModel]]:
        """The sections by the value of their tag; empty unless they are told apart by one."""
        if self.tag is None:
            return {}
        return {value: model for model in self.sections for value in _tag_values(model, self.tag)}

    def section_of(self, table: abc.Mapping[str, Any]) -> type[BaseModel] | None:
        """The section that `table` is written for; None if that cannot be told."""
        if self.tag is None:
            return self.sections[0] if len(self.sections) == 1 else None
        return self.members.get(str(table.get(self.tag)))

    def only_scalars(self, *allowed: type) -> bool:
        """Whether plain values of these types are all that may stand here (none aside)."""
        if self.opaque or self.sections or self.item or self.values or not self.scalars:
            return False
        return all(_is_one_of(scalar, allowed) for scalar in self.scalars)


@dataclass(frozen=True)
class Key:
    """One key of a section."""

    name: str
    """As written in the file."""
    attribute: str
    info: FieldInfo
    shape: Shape

    def default(self) -> Any:
        """The default, made if need be; `PydanticUndefined` where the key is required."""
        if self.info.default_factory_takes_validated_data:
            return None
        return self.info.get_default(call_default_factory=True)


@cache
def keys_of(model: type[BaseModel]) -> dict[str, Key]:
    """The keys of a section by the name they have in the file, in the order they are declared."""
    converting = {
        field
        for validator in model.__pydantic_decorators__.field_validators.values()
        if validator.info.mode != "after"
        for field in validator.info.fields
    }
    keys: dict[str, Key] = {}
    for attribute, info in model.model_fields.items():
        if info.exclude:
            continue
        shape = _shape(info.annotation, tuple(info.metadata), info.discriminator)
        if attribute in converting or "*" in converting:
            shape = replace(shape, converts=True)
        name = info.alias or attribute
        keys[name] = Key(name, attribute, info, shape)
    return keys


def choices(shape: Shape) -> tuple[str, ...]:
    """The words one may write here, where they are enumerable (unions by their tags)."""
    words: list[str] = []
    for scalar in shape.scalars:
        if get_origin(scalar) is Literal:
            words += [str(value) for value in get_args(scalar)]
        elif isinstance(scalar, type) and issubclass(scalar, enum.Enum):
            words += [str(value.value) for value in scalar]
    return tuple(words) if len(words) >= len(shape.scalars) else ()


def _shape(annotation: Any, metadata: tuple[Any, ...] = (), discriminator: Any = None) -> Shape:
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *more = get_args(annotation)
            for extra in more:
                if isinstance(extra, FieldInfo):
                    metadata = (*extra.metadata, *metadata)
                    discriminator = discriminator or extra.discriminator
                else:
                    metadata = (extra, *metadata)
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif annotation is not JsonValue and hasattr(annotation, "__value__"):
            annotation = annotation.__value__  # a type alias
        else:
            break
    for extra in metadata:
        if isinstance(extra, Discriminator):
            discriminator = extra.discriminator
    shape = _bare_shape(annotation, discriminator if isinstance(discriminator, str) else None)
    validators = (BeforeValidator, WrapValidator, PlainValidator)
    return replace(
        shape,
        converts=shape.converts or any(isinstance(extra, validators) for extra in metadata),
        bounds=(*shape.bounds, *(b for b in metadata if not isinstance(b, (*validators, AfterValidator)))),
    )


def _bare_shape(annotation: Any, tag: str | None) -> Shape:
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union([_shape(arg) for arg in args], tag)
    if annotation in (None, type(None)):
        return Shape(nullable=True)
    if annotation in (Any, object) or annotation is JsonValue:
        return Shape(opaque=True)
    if origin in _ARRAYS:
        items = [_shape(arg) for arg in args if arg is not Ellipsis]
        return Shape(item=_union(items, None) if items else Shape(opaque=True))
    if origin in _TABLES:
        return Shape(values=_shape(args[1]) if args else Shape(opaque=True))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Shape(sections=(annotation,))
    return Shape(scalars=(annotation,))


def _union(parts: list[Shape], tag: str | None) -> Shape:
    if len(parts) == 1:
        return parts[0]
    sections = tuple(dict.fromkeys(model for part in parts for model in part.sections))
    tags = [tag, *(part.tag for part in parts), _common_tag(sections) if len(sections) > 1 else None]
    return Shape(
        sections=sections,
        tag=next((name for name in tags if name), None),
        item=next((part.item for part in parts if part.item), None),
        values=next((part.values for part in parts if part.values), None),
        scalars=tuple(dict.fromkeys(scalar for part in parts for scalar in part.scalars)),
        nullable=any(part.nullable for part in parts),
        opaque=any(part.opaque for part in parts),
        converts=any(part.converts for part in parts),
        bounds=tuple(bound for part in parts for bound in part.bounds),
    )


def _common_tag(sections: tuple[type[BaseModel], ...]) -> str | None:
    """The first key that is a literal in each of the sections, with no value in two of them."""
    for name in sections[0].model_fields:
        values = [value for model in sections for value in _tag_values(model, name)]
        if len(values) == len(set(values)) and all(_tag_values(model, name) for model in sections):
            return name
    return None


def _tag_values(model: type[BaseModel], tag: str) -> tuple[str, ...]:
    info = model.model_fields.get(tag)
    if info is None or get_origin(info.annotation) is not Literal:
        return ()
    return tuple(str(value) for value in get_args(info.annotation))


def _is_one_of(scalar: Any, allowed: tuple[type, ...]) -> bool:
    if get_origin(scalar) is Literal:
        return all(type(value) in allowed for value in get_args(scalar))
    if isinstance(scalar, type) and issubclass(scalar, enum.Enum):
        return all(type(value.value) in allowed for value in scalar)
    return scalar in allowed
