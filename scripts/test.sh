#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Proves the library right: ruff, mypy, then every test. The quick, pure tests run first, real ranks under msrun last.
# Arguments go on to pytest:  scripts/test.sh -m "not dist"    scripts/test.sh tests/test_layout.py -k uneven
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env dev

"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
exec "$PYTHON" -m pytest -q "$@"
