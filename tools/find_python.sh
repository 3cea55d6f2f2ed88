#!/bin/sh
# Prints the path of a Python that can make kvjax's virtual environment: 3.12 or newer, with venv.
# $PYTHON, when set, is the only candidate. Every candidate is run before it is believed: a pyenv
# shim lies on PATH under a version's name and yet fails when that version is not selected, and
# Debian's python3 lacks ensurepip until python3-venv is installed.

check='import sys, ensurepip, venv, ssl
assert (3, 12) <= sys.version_info
print(sys.executable)'

suitable() {
    found=$("$1" -c "$check" 2>/dev/null) && [ -n "$found" ] && printf '%s\n' "$found"
}

pyenv_versions() {
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python 2>/dev/null | sort -rV
}

if [ -n "$PYTHON" ]; then
    suitable "$PYTHON" && exit 0
    echo "kvjax needs Python 3.12 or newer with the venv module, and PYTHON=$PYTHON is not." >&2
    exit 1
fi

for name in python3.14 python3.13 python3.12 python3; do
    suitable "$name" && exit 0
done
pyenv_versions | {
    while IFS= read -r path; do
        suitable "$path" && exit 0
    done
    exit 1
} && exit 0

echo "kvjax needs Python 3.12 or newer with the venv module, and found none as python3.14," \
    "python3.13, python3.12 or python3 on PATH nor under ~/.pyenv/versions. Install one" \
    "(for example: apt-get install python3.12 python3.12-venv, or pyenv install 3.12)" \
    "or name it: make PYTHON=/path/to/python3.12" >&2
exit 1
