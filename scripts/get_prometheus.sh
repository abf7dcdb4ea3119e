#!/usr/bin/env bash
# Prints the folder that has prometheus and promtool: on the path, or Debian's package unpacked below .tools, which
# starts no daemon and needs no root. Where neither is possible it says so and exits with 3.
set -euo pipefail
cd "$(dirname "$0")/.."
if command -v promtool > /dev/null && command -v prometheus > /dev/null; then
    dirname "$(command -v promtool)"
    exit 0
fi
bin="$PWD/.tools/prometheus/usr/bin"
if [ ! -x "$bin/promtool" ]; then
    command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || {
        echo "no prometheus on the path and no Debian packages here: install prometheus" >&2
        exit 3
    }
    mkdir -p .tools/prometheus
    (cd .tools && { apt-get download -q prometheus || { apt-get update -q && apt-get download -q prometheus; } } \
        && dpkg-deb -x prometheus_*.deb prometheus && rm prometheus_*.deb) >&2 || {
        echo "Debian's prometheus cannot be downloaded" >&2
        exit 3
    }
fi
echo "$bin"
