#!/usr/bin/env bash
# bandit on the code: any finding of medium severity or more fails. pip-audit on the pinned dependencies: a known
# vulnerability fails; where its data cannot be reached that is said, and nothing is claimed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1
venv=.venv-audit
if [ ! -e "$venv/.stamp" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q bandit==1.9.4 pip-audit==2.10.1
    touch "$venv/.stamp"
fi
# B615 wants a revision at every from_pretrained: files are local unless --allow-download says otherwise.
"$venv/bin/bandit" -q -r attention batching deploy loadtest scorer --severity-level medium --skip B615 \
    --exclude '*_pb2.py,*_pb2_grpc.py'
echo "bandit: nothing of medium severity or more"
found=$(mktemp)
trap 'rm -f "$found"' EXIT
"$venv/bin/pip-audit" -r constraints.txt --no-deps --disable-pip --timeout 15 -f json > "$found" 2> /dev/null || true
"$venv/bin/python" scripts/read_audit.py "$found"
