#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a Llama on NPROC ranks of this machine, or of each of several.
#
#   scripts/run_llama.sh NPROC CONFIG [--key value ...]
#
#   NPROC    ranks on this machine (NPUs, or processes on a CPU)
#   CONFIG   a file, or the name of one in model_zoo/llama/configs: tiny, quickstart, llama3_8b ...
#   --key    a key of the configuration, e.g. --train.steps 100; --print-config shows all of them and trains nothing;
#            --max_restarts N starts again after a failure
#
# Several machines: the same command on each, with
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500     (NODE_RANK=1 on the second)
# or, with as many as are there, and again without one that is lost: --nodes 2:4 --master_addr 10.0.0.1
# PYTHON names the interpreter of an environment that has MindSpore and this package; otherwise .venv here is used or made.
# The exit code is 0 if the run ended well; otherwise the traceback of the rank that failed first is shown.
set -euo pipefail

usage() { sed -n '3,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
case "${1:-}" in
    -h | --help) usage && exit 0 ;;
esac
if [[ $# -lt 2 || ! "$1" =~ ^[0-9]+$ ]]; then
    usage >&2
    exit 2
fi
nproc="$1" config="$2"
shift 2
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
[[ -f "$config" || ! -f "$root/model_zoo/llama/configs/$config.yaml" ]] || config="$root/model_zoo/llama/configs/$config.yaml"
[[ ! -f "$config" ]] || config="$(realpath "$config")"
if [[ -z "${PYTHON:-}" ]]; then
    source "$root/scripts/_env.sh"
    prepare_env
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" "$root/model_zoo/llama/launch.py" --workers "$nproc" --config "$config" "$@"
