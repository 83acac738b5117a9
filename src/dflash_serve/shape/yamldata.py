"""Data files of this room: YAML beside the code, checked by a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, StringConstraints

from dflash_serve import yamltext

Url = Annotated[str, StringConstraints(pattern=r"^https://\S+$")]
TableT = TypeVar("TableT", bound=BaseModel)


class Row(BaseModel):
    """Base of every table's parts."""

    # Built when a table is read: importing this room stays quick.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def read_table(name: str, model: type[TableT]) -> TableT:
    """The table of that file name.

    Raises:
        pydantic.ValidationError: a row that the model does not take (a mistake in this package).
    """
    path = Path(__file__).with_name(name)
    return yamltext.table(path, model)
