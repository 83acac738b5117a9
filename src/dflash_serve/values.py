"""`dataclass` of the standard library for frozen values, made in less than half the time.

The standard one compiles six methods from text for each class, up to a millisecond; a plan needs fifty classes. Here
only `__init__` is compiled, and the others read the names of the fields. What a class is and does is the same:
`fields`, `replace`, comparison, hash, repr, pickling, and that it can't be changed. The rest is left to the standard.
"""

from __future__ import annotations

import dataclasses
import inspect
import reprlib
import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, **options):
        """As `dataclasses.dataclass`."""
        if cls is None:
            return lambda cls: dataclass(cls, **options)
        if not options.get("frozen") or not options.keys() <= {"frozen", "slots"} or _unusual(cls):
            return dataclasses.dataclass(**options)(cls)
        return _frozen(cls, slots=options.get("slots", False))


# What `dataclasses` would leave as it is, refuse, or take over from a base.
OWN = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__getstate__", "__setstate__")


def _unusual(cls: type) -> bool:
    if cls.__bases__ != (object,) or not cls.__doc__ or any(name in cls.__dict__ for name in OWN):
        return True
    kinds = " ".join(map(str, inspect.get_annotations(cls).values()))
    if any(word in kinds for word in ("ClassVar", "InitVar", "KW_ONLY")):
        return True
    fields = [value for value in cls.__dict__.values() if isinstance(value, dataclasses.Field)]
    return any(not field.init or field.kw_only is True or field.hash is not None for field in fields)


def _frozen(cls: type, *, slots: bool) -> type:
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    fields = dataclasses.fields(made)
    params = made.__dataclass_params__
    params.init = params.repr = params.eq = params.frozen = True
    made.__init__ = _init(made, fields)
    made.__repr__ = _repr([field.name for field in fields if field.repr])
    made.__eq__, made.__hash__ = _comparison([field.name for field in fields if field.compare])
    made.__setattr__, made.__delattr__ = _refuse_set, _refuse_delete
    if slots:
        made.__getstate__, made.__setstate__ = _state, _set_state
    return made  # type: ignore[no-any-return]


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Any:
    names = {"set_": object.__setattr__, "made_": dataclasses._HAS_DEFAULT_FACTORY}  # type: ignore[attr-defined]
    arguments, lines = [], []
    for number, field in enumerate(fields):
        if field.default is not dataclasses.MISSING:
            names[f"default_{number}"] = field.default
            arguments.append(f"{field.name}=default_{number}")
        elif field.default_factory is not dataclasses.MISSING:
            names[f"default_{number}"] = field.default_factory
            arguments.append(f"{field.name}=made_")
            lines.append(f"  if {field.name} is made_: {field.name} = default_{number}()")
        else:
            arguments.append(field.name)
        lines.append(f"  set_(self, {field.name!r}, {field.name})")
    if hasattr(cls, "__post_init__"):
        lines.append("  self.__post_init__()")
    body = "\n".join(lines or ["  pass"])
    text = f"def make({', '.join(names)}):\n def __init__(self, {', '.join(arguments)}):\n{body}\n return __init__"
    made: dict[str, Any] = {}
    exec(text, sys.modules[cls.__module__].__dict__, made)  # noqa: S102 - as dataclasses does; names are identifiers
    init = made["make"](**names)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {**{field.name: field.type for field in fields}, "return": None}
    return init


def _repr(names: list[str]) -> Any:
    @reprlib.recursive_repr()
    def __repr__(self: Any) -> str:  # noqa: N807
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _comparison(names: list[str]) -> tuple[Any, Any]:
    get = attrgetter(*names) if names else lambda _: ()
    single = len(names) == 1

    def __eq__(self: Any, other: object) -> bool:  # noqa: N807
        return get(self) == get(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:  # noqa: N807
        return hash((get(self),) if single else get(self))

    return __eq__, __hash__


def _refuse_set(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_delete(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
