# Sourced by the other scripts. Makes .venv with requirements.txt, once. --help prints the first comment of the script.
# LOCKED=1: pip takes the versions of requirements.lock, and refuses files with other checksums.
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python base=${PYTHON:-python3}
fail() { echo "error: $*" >&2 && exit 2; }
pip_install() { "$python" -m pip install --quiet --disable-pip-version-check "$@"; }
bring() { # REQUIREMENTS MARK: installs a file of requirements, unless .venv/MARK says that this was done
    local wanted=("$1") checks=()
    if [ -n "${LOCKED:-}" ]; then
        wanted+=(requirements.lock)
        checks=(--require-hashes --constraint requirements.lock --build-constraint requirements.lock)
    fi
    if cat "${wanted[@]}" | cmp -s - ".venv/$2"; then return; fi
    echo "installing $1 into .venv (once; a few minutes)"
    "$base" -m venv .venv || fail "$base cannot make a virtual environment. On Debian: apt install python3-venv"
    # older pips know no checksums of constraints
    [ -z "${LOCKED:-}" ] || pip_install --requirement <(sed -n '/^pip==/,/[^\\]$/p' requirements.lock) || return
    pip_install "${checks[@]}" --requirement "$1" && cat "${wanted[@]}" >".venv/$2"
}
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
    || fail "$base is not Python 3.11 or newer. Name one: PYTHON=/path/to/python3"
bring requirements.txt installed.txt || exit
