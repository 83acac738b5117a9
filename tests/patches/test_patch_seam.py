"""Hooks: after an import, around functions, once."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest
from dflash2_patches import seam


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `hooked` with a module `hooked.late` that binds a name of `hooked.early`."""
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / "__init__.py").write_text("")
    (tmp_path / "hooked" / "early.py").write_text("def f(x):\n    return x + 1\n")
    (tmp_path / "hooked" / "late.py").write_text("from hooked.early import f\n\n\ndef g(x):\n    return f(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(seam, "_waiting", {})
    importlib.invalidate_caches()
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "hooked"]:
        del sys.modules[name]


def plus(amount):
    return lambda original: lambda *args: original(*args) + amount


def test_a_change_happens_before_others_bind_the_name(package):
    seam.when_imported("hooked.early", lambda module: seam.wrap(module, "f", "p", plus(10)))
    assert "hooked.early" not in sys.modules
    from hooked.late import g

    assert g(1) == 12


def test_a_change_happens_at_once_when_the_module_is_there(package):
    import hooked.early

    seam.when_imported("hooked.early", lambda module: seam.wrap(module, "f", "p", plus(10)))
    assert hooked.early.f(1) == 12


def test_changes_add_up_in_order_and_the_module_keeps_its_loader(package):
    seam.when_imported("hooked.early", lambda module: seam.wrap(module, "f", "p", plus(10)))
    seam.when_imported("hooked.early", lambda module: seam.wrap(module, "f", "q", plus(100)))
    import hooked.early

    assert hooked.early.f(1) == 112
    assert type(hooked.early.__loader__).__name__ == "SourceFileLoader"
    assert "def f" in inspect.getsource(sys.modules["hooked.early"])


def test_a_change_that_fails_fails_the_import(package):
    seam.when_imported("hooked.early", lambda module: seam.wrap(module, "absent", "p", plus(10)))
    with pytest.raises(AttributeError, match="absent"):
        importlib.import_module("hooked.late")


def test_a_module_in_the_middle_of_its_import_is_an_error(package, tmp_path):
    (tmp_path / "hooked" / "midway.py").write_text(
        "from dflash2_patches import seam\nseam.when_imported(__name__, lambda module: None)\n"
    )
    with pytest.raises(RuntimeError, match="too late"):
        importlib.import_module("hooked.midway")


def test_a_module_that_does_not_exist_stays_absent(package):
    seam.when_imported("hooked.nothing", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked.nothing")


def test_a_patch_wraps_once():
    class A:
        def f(self):
            return 1

    for _ in range(3):
        seam.wrap(A, "f", "p", lambda original: lambda self: original(self) + 1)
    seam.wrap(A, "f", "q", lambda original: lambda self: original(self) + 10)
    seam.wrap(A, "f", "p", lambda original: lambda self: original(self) + 1)
    assert A().f() == 12
    assert A.f.__name__ == "f"


def test_static_and_class_methods_stay_what_they_are():
    class A:
        @staticmethod
        def s(x):
            return x

        @classmethod
        def c(cls, x):
            return cls, x

    seam.wrap(A, "s", "p", lambda original: lambda x: original(x) + 1)
    seam.wrap(A, "c", "p", lambda original: lambda cls, x: (original(cls, x)[0], x + 1))
    assert A.s(1) == A().s(1) == 2
    assert A.c(1) == A().c(1) == (A, 2)
