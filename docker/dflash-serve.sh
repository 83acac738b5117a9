#!/bin/sh
# The tool inside the image: its own environment, its code from the copied checkout.
exec /opt/tool/bin/python -I -c 'import sys; sys.path.insert(0, "/opt/dflash-serve/src")
from dflash_serve.cli import main; main()' "$@"
