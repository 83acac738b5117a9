"""Loading recipes: inheritance, and errors that name file, line and key."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_serve.errors import ExitCode, RecipeError
from dflash_serve.recipe import catalogue
from dflash_serve.recipe.loader import chain_of, load_recipe
from dflash_serve.recipe.schema import Method, When, holds, parse_comparisons

LEAF = """\
name: leaf
title: A leaf for the tests
target:
  repo: owner/target
  revision: 0123456789abcdef0123456789abcdef01234567
  size_bytes: 10
  native_window: 4096
drafter:
  method: dflash2
  block_size: 8
  checkpoint: {repo: owner/drafter}
expect:
  acceptance_length: {min: 2, max: 4}
  source: https://example.org/figures
verified: null
"""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(text: str, name: str = "leaf") -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return _write


def refused(path: Path) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    error = caught.value
    assert error.exit_code is ExitCode.BAD_INPUT
    assert 1 <= len(error.lines()) <= 3
    return error


def test_loads_a_recipe_that_extends_nothing(write: Write) -> None:
    recipe = load_recipe(write(LEAF))
    assert recipe.drafter is not None
    assert recipe.drafter.method is Method.DFLASH2
    assert recipe.served_name == "leaf"
    assert type(recipe).model_validate(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "what", "fix"),
    [
        ("  block_size: 8", "  blok_size: 8", 10, "drafter.blok_size", "unknown key 'blok_size'", "block_size"),
        ("expect:", "expct:", 12, "expct", "unknown key 'expct'", "expect"),
        ("title: A leaf", "tilte: A leaf", 2, "tilte", "unknown key 'tilte' (and 1 more)", "title"),
        ("  repo: owner/target", "  repo: owner", 4, "target.repo", "pattern", ""),
        ("  size_bytes: 10", "  size_bytes: yes", 6, "target.size_bytes", "got True", ""),
        ("  size_bytes: 10", "  size_bytes: '10'", 6, "target.size_bytes", "valid integer, got '10'", ""),
        ("  size_bytes: 10", "  size_bytes: 0", 6, "target.size_bytes", "greater than 0, got 0", ""),
        ("  method: dflash2", "  method: dflash3", 9, "drafter.method", "'dflash2', 'dflash' or 'mtp'", ""),
        ("  block_size: 8", "  num_speculative_tokens: 99", 10, "drafter.num_speculative_tokens", "31", ""),
        ("{min: 2, max: 4}", "{min: 5, max: 4}", 13, "expect.acceptance_length", "min 5.0 is above max 4.0", ""),
        ("{min: 2, max: 4}", "{min: .nan, max: 4}", 13, "expect.acceptance_length.min", "finite", ""),
        ("{min: 2, max: 4}", "{min: 2, max: .inf}", 13, "expect.acceptance_length.max", "finite", ""),
        ("  checkpoint: {repo: owner/drafter}\n", "", 8, "drafter", "method dflash2 needs a checkpoint", ""),
        ("title: A leaf for", "title: {A: leaf} #", 2, "title", "valid string", "in quotes"),
        ("verified: null\n", "", 1, "verified", "key 'verified' is missing", ""),
        ("  source: https", "  source: http", 14, "expect.source", "pattern", ""),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_key(
    write: Write, old: str, new: str, line: int, key: str, what: str, fix: str
) -> None:
    assert old in LEAF
    path = write(LEAF.replace(old, new, 1))
    error = refused(path)
    assert what in error.what
    assert error.where == f"{path}:{line}: {key}"
    assert fix in error.fix


def test_error_in_a_parent_names_the_parents_file(write: Write) -> None:
    base = write("target: {repo: owner/target, sise_bytes: 3}\n", "_base")
    error = refused(write("extends: _base\nname: leaf\ntitle: A leaf for the tests\nverified: null\n"))
    assert error.where == f"{base}:1: target.sise_bytes"
    assert "size_bytes" in error.fix


def test_list_items_are_named_by_number(write: Write) -> None:
    path = write(LEAF + "reported:\n  - {figure: a, value: 1}\n  - {figure: b, valeu: 2}\n")
    error = refused(path)
    assert error.where.startswith(f"{path}:18: reported.1")


def test_union_members_do_not_show_in_the_key(write: Write) -> None:
    path = write(LEAF + "serve:\n  window: automatic\n")
    error = refused(path)
    assert error.where == f"{path}:17: serve.window"
    assert "'auto'" in error.what
    assert "integer" in error.what


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name: a\nname: b\n", "stands twice"),
        ("target: {repo: a/b, repo: c/d}\n", "stands twice"),
        ("a: &x [1]\nb: *x\n", "anchors and aliases"),
        ("a: &x 1\n", "anchors and aliases"),
        ("<<: {a: 1}\n", "merge keys"),
        ("a: {<<: {b: 1}}\n", "merge keys"),
        ("\tname: x\n", "not valid YAML"),
        ("name: [\n", "not valid YAML"),
        ("- a\n- b\n", "must be a mapping"),
        ("just words\n", "must be a mapping"),
        ("", "must be a mapping of keys to values, not empty"),
        ("---\na: 1\n---\nb: 2\n", "another document"),
        ("1: a\n", "a key must be a string, not '1'"),
        ("yes: a\n", "a key must be a string, not 'yes'"),
        ("null: a\n", "a key must be a string"),
        ("[1, 2]: a\n", "a key must be a string, not a collection"),
        ("a: 2026-13-45\n", "cannot be read"),
        ("a: !!int ''\n", "cannot be read"),
        ("a: !!bool maybe\n", "cannot be read"),
        ("a: !!timestamp soon\n", "cannot be read"),
        ("a: !!python/object:os.system {}\n", "not valid YAML"),
        ("a: " + "9" * 5000 + "\n", "cannot be read"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", "nested more than 32"),
        ("a: " + "[" * 60_000 + "\n", "nest"),
        ("a: " + "{b: " * 16_000 + "\n", "nest"),
        ("- " * 30_000 + "\n", "nest"),
        ("? " * 30_000 + "\n", "nest"),
        ("a: '\x07'\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_yaml_that_is_not_a_recipe(write: Write, text: str, what: str) -> None:
    assert what in refused(write(text)).what


@pytest.mark.parametrize("digits", ["0x" + "f" * 9000, ":".join(["59"] * 4000), "9" * 4000])
def test_numbers_that_python_cannot_print(write: Write, digits: str) -> None:
    """Hexadecimal and base 60 get around Python's limit on decimal digits; the message must not."""
    error = refused(write(LEAF.replace("size_bytes: 10", f"size_bytes: {digits}")))
    assert "more than 128 bits" in error.what
    assert len(error.what) < 200


def test_a_billion_laughs_costs_nothing(write: Write) -> None:
    levels = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, 20))
    began = time.perf_counter()
    assert "aliases" in refused(write(f"l0: &l0 lol\n{levels}\n")).what
    assert time.perf_counter() - began < 1


def test_files_that_cannot_be_read(tmp_path: Path, write: Write) -> None:
    assert "cannot read" in refused(tmp_path / "absent.yaml").what
    directory = tmp_path / "directory.yaml"
    directory.mkdir()
    assert "directory.yaml" in refused(directory).what
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    assert "not a regular file" in refused(fifo).what
    assert "cannot read" in refused(Path("nul\0.yaml")).what
    assert "cannot read" in refused(tmp_path / ("x" * 300 + ".yaml")).what
    assert "65536 bytes" in refused(write("a: " + "x" * 70_000, "big")).what
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"name: \xff\xfe\n")
    assert "not UTF-8" in refused(binary).what
    loop = tmp_path / "loop.yaml"
    loop.symlink_to(loop)
    assert "cannot read" in refused(loop).what


def test_name_and_file_agree(write: Write) -> None:
    assert "name is 'leaf'" in refused(write(LEAF, "other")).what


def test_a_base_is_not_a_recipe(write: Write) -> None:
    assert "is a base" in refused(write(LEAF, "_leaf")).what


# Inheritance


def child(write: Write, text: str) -> Path:
    write(LEAF)
    return write(f"extends: leaf\nname: child\ntitle: A child for the tests\n{text}", "child")


def test_a_child_states_its_own_evidence(write: Write) -> None:
    write(LEAF + "reported: [{figure: speed, value: 3, url: https://example.org}]\n")
    path = write("extends: leaf\nname: child\ntitle: A child for the tests\nverified: null\n", "child")
    recipe = load_recipe(path)
    assert recipe.reported == ()
    assert recipe.expect is not None  # same weights, same expectation
    assert "key 'verified' is missing" in refused(child(write, "")).what


def test_expectations_do_not_survive_another_drafter_or_target(write: Write) -> None:
    assert load_recipe(child(write, "drafter: null\nverified: null\n")).expect is None
    assert load_recipe(child(write, "target: {repo: owner/other}\nverified: null\n")).expect is None


def test_another_repository_keeps_nothing_of_the_old_one(write: Write) -> None:
    target = load_recipe(child(write, "target: {repo: owner/other}\nverified: null\n")).target
    assert (target.repo, target.revision, target.size_bytes) == ("owner/other", None, None)
    target = load_recipe(child(write, "target: {path: here/target}\nverified: null\n")).target
    assert (target.repo, target.path, target.revision) == (None, "here/target", None)


def test_the_same_repository_merges_key_by_key(write: Write) -> None:
    target = load_recipe(child(write, "target: {repo: owner/target, gated: true}\nverified: null\n")).target
    assert target.gated
    assert target.size_bytes == 10


def test_a_base_without_a_place_gives_its_keys(write: Write) -> None:
    write("target: {native_window: 4096, license: MIT}\n", "_base")
    path = write("extends: _base\nname: leaf\ntitle: A leaf for the tests\ntarget: {repo: a/b}\nverified: null\n")
    assert load_recipe(path).target.license == "MIT"


def test_gpu_overrides_add_up(write: Write) -> None:
    one = "gpu_overrides: [{when: {wsl2: true}, serve: {max_num_seqs: 1}, reason: one}]\n"
    write(LEAF + one)
    path = write(
        "extends: leaf\nname: child\ntitle: A child for the tests\nverified: null\n" + one.replace("one", "two"),
        "child",
    )
    assert [override.reason for override in load_recipe(path).gpu_overrides] == ["one", "two"]


@pytest.mark.parametrize(
    ("parent", "what"),
    [
        ("lef", "extends 'lef', which does not exist"),
        ("../leaf", "extends takes names"),
        ('"a\\0b"', "extends takes names"),
        ("[leaf, [a]]", "extends takes names"),
        ("12", "extends takes names"),
        ("x" * 300, "extends takes names"),
        ("child", "extends itself through child.yaml"),
        ("[leaf, lef]", "extends 'lef', which does not exist"),
        ("[leaf, leaf]", "extends leaf.yaml, which another parent extends already"),
    ],
)
def test_parents_that_cannot_be(write: Write, parent: str, what: str) -> None:
    write(LEAF)
    path = write(f"name: child\nextends: {parent}\n", "child")
    error = refused(path)
    assert what in error.what
    assert error.where == f"{path}:2: extends"
    if "lef" in parent and "exist" in what:
        assert error.fix == "did you mean leaf?"


def test_of_several_parents_the_last_wins(write: Write) -> None:
    write(LEAF)
    write("drafter: {block_size: 16, checkpoint: {repo: owner/small}}\nnotes: [small]\n", "_small")
    write("notes: [base]\nserve: {window: 64}\n", "_other")
    path = write(
        "extends: [leaf, _other, _small]\nname: child\ntitle: A child for the tests\nverified: null\n", "child"
    )
    recipe = load_recipe(path)
    assert recipe.drafter is not None
    assert recipe.drafter.method is Method.DFLASH2
    assert recipe.drafter.block_size == 16
    assert recipe.drafter.checkpoint is not None
    assert recipe.drafter.checkpoint.repo == "owner/small"
    assert recipe.expect is None  # another drafter
    assert recipe.notes == ("small",)
    assert recipe.serve.window == 64
    assert [document.path.stem for document in chain_of(path)] == ["child", "_small", "_other", "leaf"]


def test_a_common_ancestor_is_refused(write: Write) -> None:
    """Merged twice it would undo what the first parent changed."""
    write("notes: [a]\n", "_top")
    write("extends: _top\n", "_one")
    write("extends: _top\n", "_two")
    error = refused(write("extends: [_one, _two]\nname: child\n", "child"))
    assert error.what == "_one.yaml extends _top.yaml, which another parent extends already"


def test_circles_and_long_chains_end(write: Write) -> None:
    write("extends: b\n", "a")
    write("extends: a\n", "b")
    assert "extends itself" in refused(write("extends: a\n", "c")).what
    for number in range(12):
        write(f"extends: n{number + 1}\n", f"n{number}")
    assert "extends more than" in refused(write("extends: n0\n", "n")).what


# The schema's own rules


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ("gpu_overrides: [{when: {}, serve: {max_num_seqs: 1}, reason: r}]", "always true"),
        ("gpu_overrides: [{when: {wsl2: null}, serve: {max_num_seqs: 1}, reason: r}]", "always true"),
        ("gpu_overrides: [{when: {wsl2: true}, reason: r}]", "changes nothing"),
        ("gpu_overrides: [{when: {wsl2: true}, serve: {seqs: 1}, reason: r}]", "serve has no key 'seqs'"),
        ("gpu_overrides: [{when: {wsl2: true}, serve: {max_num_seqs: 0}, reason: r}]", "serve.max_num_seqs: "),
        ("gpu_overrides: [{when: {gpu_count: nan}, serve: {window: 64}, reason: r}]", "not a comparison"),
        ("gpu_overrides: [{when: {gpu_count: '=>2'}, serve: {window: 64}, reason: r}]", "not a comparison"),
        ("requires: {compute_capability: 'about 9'}", "not a comparison"),
    ],
)
def test_conditions_are_checked(write: Write, extra: str, what: str) -> None:
    assert what in refused(write(LEAF + extra + "\n")).what


@pytest.mark.parametrize("day", ["2026", "1.5", "yes", "soon"])
def test_dates_are_dates(write: Write, day: str) -> None:
    run = f"[{{hardware: h, date: {day}, vllm: 0.33.0, command: c, figures: {{}}}}]"
    assert refused(write(LEAF.replace("verified: null", f"verified: {run}"))).where.endswith("verified.0.date")


@pytest.mark.parametrize("target", ["{}", "{repo: a/b, path: c}", "{path: a, revision: " + "a" * 40 + "}"])
def test_a_checkpoint_has_one_place(write: Write, target: str) -> None:
    text = LEAF[: LEAF.index("target:")] + f"target: {target}\nverified: null\n"
    assert refused(write(text)).where.endswith(": target")


@pytest.mark.parametrize(
    ("drafter", "what"),
    [
        ("{method: mtp}", "give num_speculative_tokens"),
        ("{method: mtp, num_speculative_tokens: 1, checkpoint: {repo: a/b}}", "remove checkpoint"),
        ("{method: dflash}", "needs a checkpoint"),
    ],
)
def test_a_drafter_has_what_its_method_needs(write: Write, drafter: str, what: str) -> None:
    text = LEAF[: LEAF.index("drafter:")] + f"drafter: {drafter}\nverified: null\n"
    assert what in refused(write(text)).what


def test_comparisons() -> None:
    assert parse_comparisons(">=8.0,<8.9") == [(">=", 8.0), ("<", 8.9)]
    assert parse_comparisons("2") == [("==", 2.0)]
    assert holds(">=8.0, <8.9", 8.6)
    assert not holds(">=8.0,<8.9", 8.9)
    assert not holds(">2", 2)
    assert holds("<=2", 2)


def test_conditions_on_gpus() -> None:
    when = When(compute_capability="==8.6", gpu_count="==4", memory_gib="<=24.5")
    facts: dict[str, Any] = {"compute_capability": 8.6, "gpu_count": 4, "memory_gib": 24.0}
    assert when.holds_for(**facts)
    assert not when.holds_for(**{**facts, "gpu_count": 2})
    assert not when.holds_for(**{**facts, "memory_gib": 48.0})
    assert not When(unified_memory=True).holds_for(**facts)
    assert When(unified_memory=True).holds_for(**facts, unified_memory=True)
    assert When(wsl2=False).holds_for(**facts)
    assert not When(wsl2=True).holds_for(**facts)


# The catalogue


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        catalogue.find("qwen3.8-27b-nvpf4")
    assert "qwen3.8-27b-nvfp4" in caught.value.fix


def test_bases_are_not_listed() -> None:
    assert len(catalogue.names()) >= 18
    assert not [name for name in catalogue.names() if name.startswith("_")]
