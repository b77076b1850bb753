#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves the library right: ruff, mypy, then the tests of a push; --tier merge and --tier night add what waits (docs/tests.md).
# Arguments go on to pytest:  scripts/test.sh -m "not dist"    scripts/test.sh tests/test_layout.py -k uneven
# With another Python, in an environment of its own (.venv-3.12):  scripts/test.sh --python python3.12 [arguments]
set -euo pipefail
if [[ "${1:-}" == --python ]]; then
    export MS_DTENSOR_PYTHON="${2:?--python needs a name or a path}"
    shift 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env dev
if (($#)); then  # the only test that needs it is not of a push
    (prepare_env docs) || echo "test.sh: the test of the documentation's site will be skipped"
fi
unset PYTHONDONTWRITEBYTECODE  # a hundred processes import the same package

"$PYTHON" -m ruff check .
# Beside the tests, as types take a core for a quarter of a minute; what it says comes at the end.
types="$(mktemp)"
trap 'rm -f "$types"' EXIT
"$PYTHON" -m mypy >"$types" 2>&1 &
mypy=$!
code=0
"$PYTHON" -m pytest -q "$@" || code=$?
wait "$mypy" || code=$((code ? code : $?))
cat "$types"
exit "$code"
