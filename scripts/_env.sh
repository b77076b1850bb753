# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts beside it: finds or makes the virtual environment and installs the package into it.
#
#   prepare_env [dev,llama]    leaves $PYTHON (absolute), PATH and PYTHONPATH set; cwd is the repository's root
#
# $MS_DTENSOR_VENV names an environment that is there already; otherwise .venv in the repository is used (.venv-3.12 for
# $MS_DTENSOR_PYTHON=python3.12), and made when it is missing. pip runs only when what is asked for differs from what the stamp file in the environment says.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"

die() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 1
}

# MindSpore 2.10 has wheels up to Python 3.12; our dataclasses need 3.10.
_python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' >/dev/null 2>&1
}

_find_python() {
    local name
    if [[ -n "${MS_DTENSOR_PYTHON:-}" ]]; then
        _python_fits "$MS_DTENSOR_PYTHON" || die "'$MS_DTENSOR_PYTHON' is no Python 3.10, 3.11 or 3.12 that can be run."
        echo "$MS_DTENSOR_PYTHON"
        return
    fi
    for name in python3.11 python3.12 python3.10 python3 python; do
        if _python_fits "$name"; then
            echo "$name"
            return
        fi
    done
    die "no Python 3.10, 3.11 or 3.12 found on PATH (MindSpore 2.10 has wheels for these only).
Install Python 3.11, or set MS_DTENSOR_VENV to a virtual environment that has it."
}

_make_venv() {
    local base
    base="$(_find_python)"
    echo "Making a virtual environment in ${1#"$ROOT"/} with $("$base" --version)"
    if "$base" -c 'import ensurepip' >/dev/null 2>&1; then
        "$base" -m venv --clear "$1" || die "'$base -m venv $1' failed; see the lines above."
    else
        # Debian ships Python without ensurepip; a pip outside the environment can still fill it.
        "$base" -m venv --clear --without-pip "$1" || die "'$base -m venv $1' failed; see the lines above."
        "$base" -m pip --python "$1/bin/python" install --quiet pip || die "neither ensurepip nor a recent pip (22.3 or
newer) is there for '$base'. Install pip, or the package of your system that brings venv (Debian: python3-venv)."
    fi
}

prepare_env() {
    local extras="${1:-}" venv stamp want target base
    target=".${extras:+[$extras]}"
    if [[ -n "${MS_DTENSOR_VENV:-}" ]]; then
        venv="$MS_DTENSOR_VENV"
        [[ -x "$venv/bin/python" ]] || die "MS_DTENSOR_VENV is '$venv', but there is no $venv/bin/python."
        _python_fits "$venv/bin/python" || die "MS_DTENSOR_VENV is '$venv', with $("$venv/bin/python" --version); 3.10 to 3.12 is needed."
    else
        venv="$ROOT/.venv"
        if [[ -n "${MS_DTENSOR_PYTHON:-}" ]]; then
            base="$(_find_python)"
            venv="$venv-$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        fi
        # Also true for a half-made one, left by an interrupted first run.
        if ! { _python_fits "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }; then
            _make_venv "$venv"
        fi
    fi
    PYTHON="$(cd "$venv/bin" && pwd)/python"
    export PATH="$(dirname "$PYTHON"):$PATH" # msrun starts its workers as plain "python"
    # This clone's package, also where one environment serves several clones.
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

    stamp="$venv/.ms_dtensor.${extras:-plain}.stamp"
    want="$("$PYTHON" - "$ROOT" <<'PY'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
text = b"".join((root / name).read_bytes() for name in ("setup.py", "pyproject.toml"))
print(hashlib.sha256(text + str(root).encode() + sys.version.encode()).hexdigest())
PY
)"
    if [[ ! -f "$stamp" || "$(<"$stamp")" != "$want" ]]; then
        echo "Installing $target into $venv (the first time takes a minute or two: MindSpore is large)"
        "$PYTHON" -m pip install --quiet --disable-pip-version-check -e "$target" ||
            die "pip could not install '$target' into $venv; its own message is above."
        echo "$want" >"$stamp"
    fi
}
