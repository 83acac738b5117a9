"""YAML of our own data files, read with libyaml where PyYAML has it: it is ten times as fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_serve.kept import kept

if TYPE_CHECKING:
    import yaml
    from pydantic import BaseModel

TableT = TypeVar("TableT", bound="BaseModel")


def loader() -> type[yaml.SafeLoader]:
    """The fastest safe loader there is."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(path: Path) -> Any:
    """The content of a file; plain values only.

    Raises:
        OSError, yaml.YAMLError: it can't be read.
    """
    import yaml

    return yaml.load(path.read_bytes(), Loader=loader())  # noqa: S506 - a safe loader


def table(path: Path, model: type[TableT]) -> TableT:
    """A data file of ours, validated; read and validated again only when it was changed.

    Raises:
        pydantic.ValidationError: a row that the model does not take (a mistake in this package).
    """
    return kept(model.__name__, [path], lambda: model.model_validate(load(path)))
