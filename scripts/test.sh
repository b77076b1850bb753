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
(prepare_env docs) || echo "test.sh: the test of the documentation's site will be skipped"

"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest -q "$@"
