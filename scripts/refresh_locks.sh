#!/usr/bin/env bash
# Refresh every lock from the public package index: uv.lock, and the hash-locked requirement files in docker/requirements.
#
#   scripts/refresh_locks.sh            keep the versions that still fit
#   scripts/refresh_locks.sh --upgrade  take the newest that fit
#
# Needs uv. The settings of this machine stay out of the locks: the script refuses a lock that names another index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

index=https://pypi.org/simple
upgrade=("$@")
export UV_NO_CONFIG=1 UV_INDEX_URL=$index
unset UV_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX PIP_FIND_LINKS PIP_EXTRA_INDEX_URL 2>/dev/null || true

compile() { # NAME [options]: docker/requirements/NAME.in to NAME.txt, for Python 3.11 to 3.13 on Linux
    local name=$1
    shift
    uv pip compile "docker/requirements/$name.in" --output-file "docker/requirements/$name.txt" \
        --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
        "$@" "${upgrade[@]}"
}

export_group() { # NAME options: a part of uv.lock as docker/requirements/NAME.txt
    local name=$1
    shift
    uv export --frozen --quiet --no-header --no-annotate --no-emit-project --format requirements-txt \
        --output-file "docker/requirements/$name.txt" "$@"
}

# `uv lock` reads the project's own [tool.uv]; UV_NO_CONFIG only keeps the user's file out.
uv lock --quiet "${upgrade[@]}"
export_group tool --no-dev
export_group dev --group dev --all-extras
compile cpu --overrides docker/requirements/cpu.overrides.txt \
    --no-emit-package torch --no-emit-package torchaudio --no-emit-package torchcodec --no-emit-package torchvision
compile cuda
compile engine-tests --constraints docker/requirements/cpu.txt

if grep -nE 'file:|/simple' docker/requirements/*.txt uv.lock | grep -v "$index"; then
    echo "a lock names an index that isn't public" >&2
    exit 1
fi
if grep -oE 'https://[^/"]+' docker/requirements/*.txt uv.lock | sort -u |
    grep -vE ':https://(pypi\.org|files\.pythonhosted\.org)$'; then
    echo "a lock names a host that isn't the public index" >&2
    exit 1
fi
wc -l uv.lock docker/requirements/*.txt
