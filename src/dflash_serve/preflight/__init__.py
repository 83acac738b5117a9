"""Checks before a start: each sees one wall, all run, all findings are shown together."""
