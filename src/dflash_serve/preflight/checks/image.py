"""The image is named by digest: a tag moves, and nightly tags vanish."""

from __future__ import annotations

import re

from dflash_serve.findings import Finding, refuse, warn
from dflash_serve.preflight.context import Context

IDS = ("image-digest", "image-nightly")
# What this tool builds is named by a digest of its inputs, is never pulled, and its labels are compared at the start.
OWN = re.compile(r"dflash-serve:[a-z]+-[0-9a-f]{12}-[0-9a-f]{8}(-u\d+)?")


def check(context: Context) -> list[Finding]:
    reference = context.image.reference
    if context.runtime != "docker" or reference is None:
        return []
    if re.search(r"@sha256:[0-9a-f]{64}$", reference) or OWN.fullmatch(reference):
        return []
    if "@" in reference:
        what = "the image's digest is not a SHA-256 of 64 hex digits"
        return [refuse("image-digest", what, where=reference, fix="name it as NAME@sha256:DIGEST")]
    if re.search(r":nightly(-|$)", reference):
        what = "nightly images are removed after some weeks"
        return [warn("image-nightly", what, where=reference, fix="use a release, by digest")]
    what = "the image is named by a tag, which may be another image tomorrow"
    return [warn("image-digest", what, where=reference, fix="docker image inspect --format '{{.RepoDigests}}' IMAGE")]
