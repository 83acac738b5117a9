"""Records are complete, and each has its module and its test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from dflash2_patches import gate, records

PATCHES = Path(records.__file__).parents[1] / "patches"
RECORDS = records.load()


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_a_record_says_everything(record):
    assert record.title
    assert record.saw.endswith(".")
    assert record.does
    assert record.drop_when
    assert record.touches
    assert record.links
    assert all(link.startswith("https://") for link in record.links)
    assert set(record.applies_to) <= set(gate.KNOWN)
    assert bool(record.applies_to) == (record.kind != "probe")
    assert record.fixed or record.switch, "how would anybody see that upstream has it?"


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.id)
def test_a_record_that_changes_something_has_a_module_with_apply(record):
    file = PATCHES / f"{record.module}.py"
    assert file.exists() == (record.kind != "probe")
    if file.exists():
        tree = ast.parse(file.read_text())
        assert "apply" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert f"`{record.id}`" in (ast.get_docstring(tree) or "")


def test_no_module_without_a_record():
    modules = {file.stem for file in PATCHES.glob("*.py")} - {"__init__"}
    assert modules == {r.module for r in RECORDS if r.kind != "probe"}


def test_modules_import_nothing_but_the_standard_library_at_the_top():
    # vLLM swallows the import error of a plugin: nothing that can fail may run before register().
    for file in [*PATCHES.glob("*.py"), *PATCHES.parent.glob("*.py"), *(PATCHES.parent / "records").glob("*.py")]:
        if file.name == "metrics.py":  # loaded by vLLM itself, as a stat logger
            continue
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.split(".")[0] for n in names} & {"vllm", "torch", "triton", "numpy", "yaml"}, file.name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('title = "x"\n', "links"),
        (
            'kind = "other"\ntitle=""\nsaw=""\ndoes=""\ndrop_when=""\nlinks=[]\napplies_to=[]\ntouches=[]\n',
            "kind is 'other'",
        ),
        (
            'colour=1\nkind="patch"\ntitle=""\nsaw=""\ndoes=""\ndrop_when=""\nlinks=[]\napplies_to=[]\ntouches=[]\n',
            "colour",
        ),
    ],
)
def test_a_broken_record_names_the_file_and_the_key(text, says, tmp_path: Path):
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.toml") as caught:
        records._read(file)
    assert says in str(caught.value)
