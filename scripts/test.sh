#!/usr/bin/env bash
# All tests: bash scripts/test.sh. Without the slow ones: bash scripts/test.sh quick.
source "$(dirname "$0")/setup.sh"
arguments=("$@")
if [ "${1:-}" = quick ]; then arguments=(-m "not slow" "${@:2}"); fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the files of tests share the cores, each test has one
exec "$python" -m pytest tests -q -n auto --maxprocesses 4 --dist loadfile "${arguments[@]}"
