"""Fixtures of the planner's tests."""

from hub_checkout import checkout  # noqa: F401 - a fixture
