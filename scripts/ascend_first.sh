#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Half an hour on a borrowed Ascend node, and one file to mail back; what and how: ascend_first.py beside this file.
# Runs in the Python that is there ($PYTHON, else python), with its MindSpore and CANN; installs nothing.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
for setenv in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh; do
    set +u
    [[ -n "${ASCEND_HOME_PATH:-}" || ! -f "$setenv" ]] || source "$setenv"
    set -u
done
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" "$root/scripts/ascend_first.py" "$@"
