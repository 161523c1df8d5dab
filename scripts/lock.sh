#!/usr/bin/env bash
# Renews requirements.lock: every package with its version and PyPI's checksums, for Python 3.11 and newer on all
# platforms. --upgrade takes the newest versions. pip is locked too, because older pips cannot check checksums.
set -euo pipefail && cd "$(dirname "$0")/.."
uv=$(PATH=.venv/bin:$PATH command -v uv) || { echo "error: uv is missing. Install it: pip install uv" >&2 && exit 2; }
printf 'pip\n' | env -u UV_INDEX -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS "$uv" --no-config pip compile --quiet "$@" \
    --universal --python-version 3.11 --default-index https://pypi.org/simple --generate-hashes --no-annotate \
    --custom-compile-command "bash scripts/lock.sh" --output-file requirements.lock \
    requirements.txt requirements-extras.txt - >/dev/null
