#!/usr/bin/env bash
# Renews requirements.lock: what requirements.txt and requirements-extras.txt bring, each package with its version and
# the SHA-256 of its files on PyPI, for Python 3.11 and newer on every platform. It needs uv (pip install uv).
#
#   bash scripts/lock.sh                               adds and removes what the files ask for, keeps other versions
#   bash scripts/lock.sh --upgrade                     the newest version of every package
#
# Other indexes are left out, and so are the settings of uv and pip on this machine: what they serve may be builds of
# their own, whose checksums nobody else's files have. pip itself is in it too: older ones cannot check this way.
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in -h | --help) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
uv=$(PATH=.venv/bin:$PATH command -v uv) || { echo "error: uv makes the lock: pip install uv" >&2 && exit 2; }
printf 'pip\n' | env -u UV_INDEX -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS "$uv" --no-config pip compile --quiet \
    --universal --python-version 3.11 --default-index https://pypi.org/simple --generate-hashes --no-annotate \
    --custom-compile-command "bash scripts/lock.sh" --output-file requirements.lock "$@" \
    requirements.txt requirements-extras.txt - >/dev/null
