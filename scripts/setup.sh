# Sourced by the other scripts: makes .venv with requirements.txt in it, or does nothing when that was done.
# With --help it installs nothing, prints the comment that the script begins with, and ends.
set -euo pipefail
for word in "$@"; do
    if [ "$word" = --help ] || [ "$word" = -h ]; then
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit
    fi
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
system_python=${PYTHON:-python3}
if ! "$system_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "error: Python 3.11 or newer is needed as $system_python; name another one with PYTHON=/path/to/python3" >&2
    exit 2
fi
if ! cmp -s requirements.txt .venv/installed.txt; then
    echo "installing requirements.txt into .venv (once; a few minutes)"
    if ! "$system_python" -m venv .venv; then
        echo "error: $system_python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
        exit 2
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt .venv/installed.txt
fi
python=.venv/bin/python
