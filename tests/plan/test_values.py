"""Our frozen dataclasses are what the standard library's are, only made sooner."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_serve import values
from dflash_serve.checkpoint.facts import Rope
from dflash_serve.shape.memory import Shape


def pair(slots: bool) -> tuple[type[Any], type[Any]]:
    """One class body, made by the standard library and by us."""

    def body() -> type:
        class Point:
            """A point."""

            x: int
            y: float = 1.5
            tags: list[str] = dataclasses.field(default_factory=list)
            note: str = dataclasses.field(default="", compare=False)
            hidden: int = dataclasses.field(default=3, repr=False)

            @property
            def double(self) -> int:
                return 2 * self.x

        return Point

    return dataclasses.dataclass(frozen=True, slots=slots)(body()), values.dataclass(frozen=True, slots=slots)(body())


@pytest.mark.parametrize("slots", [True, False])
@given(x=st.integers(), y=st.floats(allow_nan=False), tags=st.lists(st.text(max_size=3), max_size=2), note=st.text())
def test_they_agree(slots: bool, x: int, y: float, tags: list[str], note: str) -> None:
    standard, ours = pair(slots)
    a, b = standard(x, y, tags=tags, note=note), ours(x, y, tags=tags, note=note)
    assert repr(a) == repr(b)
    assert a.double == b.double
    assert b == ours(x, y, tags=tags, note="other")
    assert (b == ours(x + 1, y)) is (a == standard(x + 1, y)) is False
    assert b != a
    assert dataclasses.asdict(a) == dataclasses.asdict(b)
    assert dataclasses.replace(b, x=5) == ours(5, y, tags)
    assert copy.deepcopy(b) == b == copy.copy(b)
    for value in (a, b):
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)
    assert hash(ours(x, y, ("a",))) == hash(standard(x, y, ("a",)))


@pytest.mark.parametrize("slots", [True, False])
def test_they_have_the_same_form(slots: bool) -> None:
    standard, ours = pair(slots)
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(standard)]
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(standard).parameters)
    assert ours.__match_args__ == standard.__match_args__
    assert repr(ours.__dataclass_params__) == repr(standard.__dataclass_params__)
    assert getattr(ours, "__slots__", None) == getattr(standard, "__slots__", None)
    assert ours(1).tags is not ours(1).tags
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        ours()
    for change in (lambda v: setattr(v, "x", 2), lambda v: setattr(v, "new", 2), lambda v: delattr(v, "x")):
        for made in (standard, ours):
            with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
                change(made(1))
        with pytest.raises(dataclasses.FrozenInstanceError):
            change(ours(1))


def test_what_a_plan_uses_can_be_kept() -> None:
    rope = Rope(type="yarn", factor=2.0, mrope_section=(1, 2))
    assert pickle.loads(pickle.dumps(rope)) == rope
    assert {rope: 1}[Rope(type="yarn", factor=2.0, mrope_section=(1, 2))] == 1
    assert Rope.__init__.__qualname__ == "Rope.__init__", "made by us"
    assert Rope.__eq__.__qualname__.startswith("_comparison"), "made by us"
    assert Shape.__eq__.__qualname__.startswith("_comparison"), "made by us"


def test_the_unusual_goes_to_the_standard_library() -> None:
    class Base:
        """A base."""

        x: int

    class Own(Base):
        """Inherits."""

        y: int = 0

    class Compares:
        """Has its own equality."""

        x: int

        def __eq__(self, other: object) -> bool:
            return True

    class Keywords:
        """Has a keyword."""

        x: int = dataclasses.field(kw_only=True)

    for cls in (Own, Compares, Keywords):
        made = values.dataclass(frozen=True)(cls)
        assert dataclasses.is_dataclass(made)
        assert made.__setattr__.__module__ != values.__name__
    assert values.dataclass(Base)(3).x == 3
    changed = values.dataclass(Base)(3)
    changed.x = 4
    with pytest.raises(TypeError):
        Keywords(3)
    assert Compares(3) == 5


def test_a_post_init_runs() -> None:
    class Checked:
        """Refuses what is negative."""

        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")

    made = values.dataclass(frozen=True, slots=True)(Checked)
    assert made(1).x == 1
    with pytest.raises(ValueError, match="negative"):
        made(-1)
