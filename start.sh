#!/usr/bin/env bash
# Makes the tool's virtual environment once, then hands over to dflash-serve. See --help.
set -u
umask 022

script=$(readlink -f -- "${BASH_SOURCE[0]}") || exit 1
root=${script%/*}
venv=$root/.venv

help() {
    cat <<'EOF'
./start.sh: serve a model with its DFlash2 drafter, and prove that it works.

  ./start.sh tiny                  serve the tiny pair; runs anywhere, also without a GPU
  ./start.sh qwen3.8-27b-nvfp4     serve Qwen3.8-27B on an NVIDIA GPU
  ./start.sh recipes list          what else can be served
  ./start.sh plan NAME             every decision with its reason; starts nothing
  ./start.sh status                what runs: URL, key file, acceptance length
  ./start.sh logs -f               follow the server's log
  ./start.sh down                  stop it
  ./start.sh test                  run the quick tests; arguments go to pytest
  ./start.sh test engine           run those that need vLLM, in its CPU environment

./start.sh NAME is short for ./start.sh up NAME: plan, check the machine, build what is missing, start, wait until
the server answers, verify, and leave it running (--foreground stays attached). Options follow the name:

  ./start.sh up --help             all of them
  ./start.sh --commands            all commands; each has --help

The first run makes .venv beside this file (with uv where it is installed, else with python3 and pip), from locked
versions with hashes. The engine, which is larger, goes to ~/.cache/dflash-serve. Both are made once, resume after
an interruption, and are remade when a lock changes.

  DFLASH_SERVE_CACHE=DIR           engine and overlays go there
  DFLASH_SERVE_NO_UV=1             use python3 and pip even where uv is installed

Exit codes: 0 done, 2 usage, 3 bad recipe or checkpoint, 4 this machine can't (the message says what is missing),
5 build failed, 6 the server failed to start, 7 it serves, but not as it should.
EOF
}

say() { printf '%s\n' "$*" >&2; }

fail() { # CODE WHAT FIX
    say "start.sh: $2"
    [ -z "${3:-}" ] || say "fix: $3"
    exit "$1"
}

# Runs a step, its output kept back; when it fails, `why` holds the line that tells why.
attempt() {
    local output
    if output=$("$@" 2>&1); then
        return 0
    fi
    why=$(printf '%s\n' "$output" | grep -iE 'no space left|disk quota|errno 28|os error 28' | tail -n 1)
    if [ -n "$why" ]; then
        fail 5 "the disk is full: $root" "free some space, then start again: it goes on from here"
    fi
    why=$(printf '%s\n' "$output" | grep -iE '^ *(error|cause|fatal)|error:' | tail -n 1)
    [ -n "$why" ] || why=$(printf '%s\n' "$output" | grep -v '^ *$' | tail -n 1)
    return 1
}

fits() { # PYTHON: it runs, and is a version that we support
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() { # sets python; fails with the reason when none fits
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if python=$(command -v "$name") && fits "$python"; then
            return 0
        fi
    done
    python=
    return 1
}

no_python() {
    local found version
    if found=$(command -v python3) && version=$("$found" -c 'import platform; print(platform.python_version())' 2>/dev/null); then
        fail 5 "Python 3.11, 3.12 or 3.13 is needed; $found is $version" \
            "apt install python3.12 python3.12-venv, or install uv (docs.astral.sh/uv)"
    fi
    fail 5 "Python 3.11, 3.12 or 3.13 is needed; no python3 is installed" "apt install python3 python3-venv"
}

with_uv() { # [sync options]
    command -v uv >/dev/null && [ "${DFLASH_SERVE_NO_UV:-}" != 1 ] || return 1
    say "· making .venv with uv: $what"
    if attempt env -u VIRTUAL_ENV UV_PROJECT_ENVIRONMENT="$venv" \
        uv sync --quiet --frozen --inexact --compile-bytecode --project "$root" ${python:+--python "$python"} "$@"; then
        return 0
    fi
    say "  uv could not: $why"
    return 1
}

with_pip() { # REQUIREMENTS
    local version
    [ -n "$python" ] || no_python
    if ! { [ -x "$venv/bin/python" ] && fits "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
        if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
            version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
            fail 5 "$python cannot make virtual environments" "apt install python$version-venv (or python3-venv)"
        fi
        say "· making .venv with $python"
        attempt "$python" -m venv --clear "$venv" || fail 5 "making .venv failed: $why"
    fi
    say "· installing $what with pip"
    attempt "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
        -r "$root/docker/requirements/$1" || fail 5 "installing $what failed: $why" "start again: it goes on from here"
    attempt "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e "$root" ||
        fail 5 "installing dflash-serve failed: $why" "start again: it goes on from here"
}

# What .venv is made from; the path is in it, since an editable install holds it.
wanted() {
    printf '%s %s' "$root" "$(cat "$root/uv.lock" "$root/pyproject.toml" | cksum)"
}

made() { # MARKER: .venv was made whole from what is wanted
    local content
    [ -x "$venv/bin/python" ] && { read -r content <"$venv/$1"; } 2>/dev/null && [ "$content" = "$(wanted)" ]
}

make_venv() { # MARKER WHAT REQUIREMENTS [uv options]
    local marker=$1 what=$2 requirements=$3 why='' python=''
    shift 3
    case $(uname -sm) in
        'Linux x86_64' | 'Linux aarch64') ;;
        *) fail 5 "Linux on x86_64 or aarch64 is needed; this is $(uname -sm)" "on Windows, use WSL 2" ;;
    esac
    [ -w "$root" ] || fail 5 "$root is not writable" "clone the project to a directory that you own"
    # An interrupted start leaves a pyvenv.cfg, or no file at all.
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(find "$venv" ! -type d)" ]; then
        fail 5 "$venv exists and is not a virtual environment" "move it away"
    fi
    # Two first starts at once: the second waits here, and finds the work done.
    if command -v flock >/dev/null && exec 9<"$root"; then
        flock -n 9 || { say "· another start makes .venv: waiting for it" && flock 9; }
        if made "$marker"; then
            exec 9<&-
            return
        fi
    fi
    trap 'say "interrupted; the next start goes on from here"; exit 130' INT TERM
    rm -f "$venv/.dflash-tool" "$venv/.dflash-dev"
    # An interpreter that was removed or no longer fits leaves nothing worth keeping.
    if [ -e "$venv" ] && ! fits "$venv/bin/python"; then
        rm -rf "$venv"
    fi
    find_python
    with_uv "$@" || with_pip "$requirements"
    # Compiled now, the tool starts in half the time, also where Python is told not to write byte code.
    "$venv/bin/python" -m compileall -q "$root/src" >/dev/null 2>&1 || :
    if ! { wanted >"$venv/$marker" && echo >>"$venv/$marker"; } 2>/dev/null; then
        rm -f "$venv/$marker"
        fail 5 "the disk is full: $root" "free some space, then start again"
    fi
    # The development packages include the tool's.
    [ "$marker" = .dflash-tool ] || cp "$venv/$marker" "$venv/.dflash-tool"
    trap - INT TERM
    exec 9<&-
}

need_tool() {
    made .dflash-tool || make_venv .dflash-tool "dflash-serve and its dependencies" tool.txt --no-dev
}

case ${1:-} in
    '')
        help >&2
        exit 2
        ;;
    -h | --help | help) help ;;
    --commands)
        need_tool
        exec "$venv/bin/dflash-serve" --help
        ;;
    test)
        shift
        made .dflash-dev || make_venv .dflash-dev "the tool and its tests' dependencies" dev.txt --all-extras
        cd "$root" || exit 1
        if [ "${1:-}" = engine ]; then
            shift
            python=$("$venv/bin/dflash-serve" environment install cpu --tests) || exit
            # Only the files of those tests (a conftest.py stands for its directory): the engine's environment
            # holds neither the tool, which is imported from src, nor all that the tool needs.
            mapfile -t places < <(grep -rlE --include='*.py' 'pytest\.mark\.engine' tests | sed 's|/conftest\.py$||' | sort -u)
            PYTHONPATH=$root/src exec "$python" -m pytest -m engine "${places[@]}" "$@"
        fi
        [ $# -gt 0 ] || set -- -m "not engine and not serve and not docker"
        exec "$venv/bin/python" -m pytest "$@"
        ;;
    up | down | status | logs | plan | fit | preflight | overlay | build | image | verify | bench | top | doctor | recipes | render | \
        fetch | serve | patches | metrics | dashboard | pins | environment | manifest | completion | version | --version)
        need_tool
        exec "$venv/bin/dflash-serve" "$@"
        ;;
    -*) fail 2 "no option $1" "the recipe's name comes first: ./start.sh NAME [options]; see ./start.sh --help" ;;
    *)
        need_tool
        exec "$venv/bin/dflash-serve" up "$@"
        ;;
esac
