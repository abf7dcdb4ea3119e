#!/usr/bin/env bash
# Mutation testing of the pure half of attention and batching: changes the code in hundreds of small ways, and looks
# which changes the tests of these packages notice. Hours for everything; patterns such as "attention.layout*" for less.
#   scripts/mutants.sh BIN MINIMUM [PATTERN ...]
set -euo pipefail
bin=$(cd "$1" && pwd) minimum=$2
shift 2
cd "$(dirname "$0")/.."
export MUTANTS=1 OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
"$bin/mutmut" run "$@"
"$bin/mutmut" export-cicd-stats
"$bin/python" scripts/mutation_score.py mutants/mutmut-cicd-stats.json "$minimum"
