#!/usr/bin/env bash
# Generates the Python stubs and their types.   generate_stubs.sh BIN protos      writes them
#                                               generate_stubs.sh BIN --compare   fails if the committed ones differ
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
out=$2
if [ "$out" = --compare ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
"$bin/python" -m grpc_tools.protoc -I protos \
  --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  prefixrank/v1/scorer.proto
if [ "$2" = --compare ]; then
  for file in scorer_pb2.py scorer_pb2.pyi scorer_pb2_grpc.py scorer_pb2_grpc.pyi; do
    diff -u "protos/prefixrank/v1/$file" "$out/prefixrank/v1/$file" || { echo "stubs are stale: make stubs" >&2; exit 1; }
  done
  echo "stubs match the proto"
fi
