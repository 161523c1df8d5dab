#!/usr/bin/env bash
# All tests: bash scripts/test.sh. Without the slow ones: bash scripts/test.sh quick.
source "$(dirname "$0")/setup.sh"
arguments=("$@")
if [ "${1:-}" = quick ]; then arguments=(-m "not slow" "${@:2}"); fi
exec "$python" -m pytest tests -q "${arguments[@]}"
