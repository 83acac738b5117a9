"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Wall-clock deadlines fail on a busy machine and say nothing about the code.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")
