# Sourced by the other scripts: makes .venv with requirements.txt in it, or does nothing when that was done.
# With LOCKED=1 pip takes from requirements.lock which versions, and refuses files of other checksums than there.
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
pip_install() { .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"; }
# Brings a requirements file into .venv, once: there, the file MARK is a copy of what was brought.
bring() { # REQUIREMENTS MARK
    local wanted=("$1") checks=()
    if [ -n "${LOCKED:-}" ]; then
        wanted+=(requirements.lock)
        checks=(--require-hashes --constraint requirements.lock --build-constraint requirements.lock)
    fi
    if cat "${wanted[@]}" | cmp -s - ".venv/$2"; then return; fi
    echo "installing $1 into .venv (once; a few minutes)"
    if ! "$system_python" -m venv .venv; then
        echo "error: $system_python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2
        exit 2
    fi
    if [ -n "${LOCKED:-}" ]; then # older pips know no checksums of constraints
        pip_install --requirement <(sed -n '/^pip==/,/[^\\]$/p' requirements.lock) || return
    fi
    pip_install "${checks[@]}" --requirement "$1" && cat "${wanted[@]}" >".venv/$2"
}
bring requirements.txt installed.txt || exit
python=.venv/bin/python
