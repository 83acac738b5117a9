"""The template and a variant to a Dockerfile. Same inputs, same bytes."""

from __future__ import annotations

import jinja2

from dflash_serve import paths
from dflash_serve.errors import BuildFailed
from dflash_serve.image import variants
from dflash_serve.image.identity import TEMPLATE, Identity
from dflash_serve.version import __version__


def render(image: Identity) -> str:
    """The Dockerfile of that image, with a final newline.

    Raises:
        BuildFailed: the template is missing, or names something that isn't there.
    """
    images, root = variants.load(), paths.project_root()
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 (a Dockerfile, not HTML)
    )
    variant, spec = image.variant, image.spec
    try:
        template = environment.from_string((root / TEMPLATE).read_text("utf-8"))
        return template.render(
            variant=variant,
            base=variant.base.reference,
            pinned=variant.base.digest is not None,
            packages=sorted(variant.packages),
            engine={
                "distribution": spec.distribution,
                "vllm_version": spec.vllm_version,
                "torch_version": spec.torch_version,
                "lock": spec.lock.relative_to(root).as_posix(),
            },
            user=images.user.name,
            uid=image.uid,
            health=images.healthcheck,
            digest=image.engine,
            tool_version=__version__,
            labels=image.labels,
        )
    except OSError as exc:
        raise BuildFailed(f"cannot read the template: {exc.strerror}", where=str(root / TEMPLATE)) from None
    except jinja2.TemplateError as exc:
        line = getattr(exc, "lineno", None)
        where = f"{root / TEMPLATE}:{line}" if line else str(root / TEMPLATE)
        raise BuildFailed(f"the template does not render: {exc}", where=where) from None
