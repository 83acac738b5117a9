#!/usr/bin/env bash
# A Docker engine of its own for the tests marked `docker`, and a stand-in for the base image where no registry
# can be reached. For throw-away machines such as CI runners: it installs packages. Root, Debian 12 or newer.
#
#   scripts/test_engine.sh start DIR   install what is missing, start the engine, make the stand-in base;
#                                      prints the variables to export; does nothing when it runs already
#   scripts/test_engine.sh stop DIR    stop that engine, by its pid file, and remove DIR
#
# DIR holds the engine's data, socket, log and pid file; it becomes a tmpfs where the machine has the memory.
# The base's root file system is kept in DFLASH_ENGINE_BASE (default DIR.base.tar), since making it takes a while.
#
# The engine touches no firewall rule: builds use the host's network, published ports go through Docker's proxy.
# pip's certificates, index and local wheel directories are copied into the stand-in base: it is for tests only.
set -euo pipefail

verb=${1:-}
dir=${2:-}
case "$verb" in start | stop) ;; *) sed -n '2,12p' "$0" >&2; exit 2 ;; esac
[ -n "$dir" ] || { echo "test_engine.sh: no directory given" >&2; exit 2; }
dir=$(realpath -m "$dir")
socket=$dir/docker.sock
base_tar=${DFLASH_ENGINE_BASE:-$dir.base.tar}
# What images.yaml names is mapped to this one when the tests build.
base_image=local/python:test
export DOCKER_HOST=unix://$socket DEBIAN_FRONTEND=noninteractive

say() { printf 'test_engine: %s\n' "$*" >&2; }

fail() {
    say "$1"
    [ -z "${2:-}" ] || tail -n 15 "$2" >&2
    exit 1
}

until_ok() { # SECONDS COMMAND...
    local tries=$1
    shift
    for _ in $(seq "$tries"); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 1
    done
    return 1
}

apt_install() { # LOG PACKAGE...
    local log=$1
    shift
    apt-get install -y -qq --no-install-recommends "$@" >"$log" 2>&1 || fail "apt-get install failed" "$log"
}

install_packages() {
    local log=$dir/apt.log
    if ! command -v mmdebstrap >/dev/null || ! command -v ip >/dev/null; then
        apt-get update -qq
        apt_install "$log" mmdebstrap iproute2 ca-certificates
    fi
    # buildx: secrets, cache mounts and mapped bases are BuildKit's. compose: version 2, a plugin.
    local need=()
    command -v dockerd >/dev/null && command -v docker >/dev/null || need+=(docker.io docker-cli containerd)
    docker buildx version >/dev/null 2>&1 || need+=(docker-buildx)
    docker compose version >/dev/null 2>&1 || need+=(docker-compose)
    [ "${#need[@]}" -gt 0 ] || return 0
    apt-get update -qq
    if [ "$(sed -n 's/^VERSION_ID="\?\([0-9]*\).*/\1/p' /etc/os-release)" != 12 ]; then
        apt_install "$log" "${need[@]}"
        return
    fi
    # Debian 12 has buildx not at all and compose as the old script: take what is missing from the next suite, with a
    # package list of its own.
    local apt=$dir/apt options
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$dir/debs"
    awk 'BEGIN{RS="";ORS="\n\n"} NR==1' /etc/apt/sources.list.d/debian.sources |
        sed 's/^Suites:.*/Suites: trixie/' >"$apt/next.sources"
    options=(-o "Dir::Etc::sourcelist=$apt/next.sources" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$apt/lists"
        -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
    apt-get "${options[@]}" update -qq
    (cd "$dir/debs" && apt-get "${options[@]}" download -qq "${need[@]}")
    apt_install "$log" "$dir"/debs/*.deb
    rm -rf "$dir/debs" "$apt"
}

start_engine() {
    if docker version >/dev/null 2>&1; then return; fi
    # It outlives this script: a lock that the caller holds by an open file (flock) must not stay with it.
    setsid dockerd -H "unix://$socket" --data-root "$dir/data" --exec-root "$dir/exec" --pidfile "$dir/docker.pid" \
        --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
        --bip 172.28.0.1/24 --default-address-pool base=172.29.0.0/16,size=24 \
        >"$dir/dockerd.log" 2>&1 </dev/null 3>&- 4>&- 5>&- 6>&- 7>&- 8>&- 9>&- &
    until_ok 40 docker version || fail "the engine did not start" "$dir/dockerd.log"
    say "engine $(docker info -f '{{.ServerVersion}}, {{.Driver}}' 2>/dev/null)"
}

# What pip needs to reach its index from inside a build: certificates, the index's address, directories of wheels.
copy_pip_settings() { # ROOTFS
    local rootfs=$1 index links link
    mkdir -p "$rootfs/usr/local/share/ca-certificates"
    cp /usr/local/share/ca-certificates/*.crt "$rootfs/usr/local/share/ca-certificates/" 2>/dev/null || true
    chroot "$rootfs" update-ca-certificates >/dev/null 2>&1
    index=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
    links=${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2>/dev/null || true)}
    {
        echo "[global]"
        echo "cert = /etc/ssl/certs/ca-certificates.crt"
        [ -z "$index" ] || echo "index-url = $index"
        [ -z "$links" ] || echo "find-links = $links"
    } >"$rootfs/etc/pip.conf"
    for link in $links; do
        if [ -d "$link" ]; then
            mkdir -p "$rootfs$link"
            cp -a "$link/." "$rootfs$link/"
        fi
    done
}

make_base() {
    if docker image inspect "$base_image" >/dev/null 2>&1; then return; fi
    if [ ! -s "$base_tar" ]; then
        say "making the stand-in base (mmdebstrap)"
        local rootfs=$dir/rootfs
        TMPDIR=$dir mmdebstrap --variant=minbase --dpkgopt=force-unsafe-io --include=ca-certificates,python3,python3-venv \
            bookworm "$rootfs" >"$dir/base.log" 2>&1 || fail "mmdebstrap failed" "$dir/base.log"
        # The official Python image has its interpreter there, and no distribution's guard against pip.
        ln -sf /usr/bin/python3 "$rootfs/usr/local/bin/python3"
        rm -f "$rootfs"/usr/lib/python3*/EXTERNALLY-MANAGED
        copy_pip_settings "$rootfs"
        rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/*_*
        tar -C "$rootfs" -cf "$base_tar.part" .
        mv "$base_tar.part" "$base_tar"
        rm -rf "$rootfs"
    fi
    docker import --change 'CMD ["python3"]' - "$base_image" <"$base_tar" >/dev/null
    say "stand-in base $base_image"
}

alive() { [ "$(cat "/proc/$1/comm" 2>/dev/null)" = dockerd ] && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"; }

detach() { # MOUNT
    say "$1 is still in use: detached, its holder keeps it until it ends"
    umount -l "$1"
}

stop_engine() {
    local pid mount
    pid=$(cat "$dir/docker.pid" 2>/dev/null || true)
    if [ -n "$pid" ] && alive "$pid"; then
        docker ps -aq 2>/dev/null | xargs -r docker rm -f >/dev/null 2>&1 || true
        kill "$pid"
        for _ in $(seq 150); do
            alive "$pid" || break
            sleep 0.2
        done
        if alive "$pid"; then kill -9 "$pid"; fi
        ip link del docker0 2>/dev/null || true
    fi
    awk -v w="$dir/" 'index($5, w) == 1 {print $5}' /proc/self/mountinfo | sort -r | while read -r mount; do
        until_ok 15 umount "$mount" || detach "$mount"
    done
    # The engine's last threads hold its files for a moment after its process is gone.
    if mountpoint -q "$dir"; then until_ok 15 umount "$dir" || detach "$dir"; fi
    # Never delete through a mount that is still there.
    if awk -v w="$dir" '$5 == w || index($5, w "/") == 1 {found = 1} END {exit !found}' /proc/self/mountinfo; then
        fail "something is still mounted below $dir"
    fi
    rm -rf "$dir"
}

[ "$(id -u)" = 0 ] || fail "needs root, to install packages and to run an engine"
if [ "$verb" = stop ]; then
    stop_engine
    exit 0
fi
mkdir -p "$dir" "$(dirname "$base_tar")"
memory=$(awk '/MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
if [ "$memory" -ge 18 ] && ! mountpoint -q "$dir" && [ ! -e "$dir/docker.pid" ]; then
    mount -t tmpfs -o size=11g,mode=755 dflash-engine "$dir"
fi
install_packages
start_engine
make_base
echo "export DOCKER_HOST=unix://$socket"
echo "export DFLASH_TEST_BASE=$base_image"
