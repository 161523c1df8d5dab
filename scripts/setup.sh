# The other scripts source this file. It installs requirements.txt into .venv, once. --help prints a script's first
# comment. With LOCKED=1, pip takes the versions of requirements.lock, and refuses files with other checksums.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python base=${PYTHON:-python3}
fail() { echo "error: $*" >&2 && exit 2; }
pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
bring() { # REQUIREMENTS MARK: installs a requirements file, unless .venv/MARK is a copy of that file
    local wanted=("$1") checks=()
    if [ -n "${LOCKED:-}" ]; then
        wanted+=(requirements.lock)
        checks=(--require-hashes --constraint requirements.lock --build-constraint requirements.lock)
    fi
    if cat "${wanted[@]}" | cmp -s - ".venv/$2"; then return; fi
    echo "installing $1 into .venv (once; a few minutes)"
    "$base" -m venv .venv || fail "$base cannot make a virtual environment. On Debian: apt install python3-venv"
    # older pips cannot check the checksums of constraints, so the locked pip comes first
    [ -z "${LOCKED:-}" ] || pip_install --requirement <(sed -n '/^pip==/,/[^\\]$/p' requirements.lock) || return
    pip_install "${checks[@]}" --requirement "$1" && cat "${wanted[@]}" >".venv/$2"
}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || fail "$base is not Python 3.11 or newer. Set PYTHON=/path/to/python3 before the command."
bring requirements.txt installed.txt || exit
