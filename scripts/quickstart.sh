#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a small Llama on 8 ranks of this machine: data x tensor x sequence parallelism on real text. Then it shows what they
# did: the loss, what was communicated, a text that the model writes. Under two minutes on two cores, the install aside.
# Arguments go on to launch.py:  scripts/quickstart.sh --train.steps 10
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
prepare_env

# Every process of this run inherits this mark, and no other process has it: that is how leftovers are known.
RUN_MARK="MS_DTENSOR_RUN=quickstart-$$-$(date +%s)"

leftovers() { # ids of live processes of this run; Linux only, elsewhere it finds none
    grep -lszF "$RUN_MARK" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || true
}

end_leftovers() {
    local pids
    pids="$(leftovers)"
    [[ -z "$pids" ]] || kill -KILL $pids 2>/dev/null || true
}
trap end_leftovers EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

shm_before="$(ls -A /dev/shm 2>/dev/null || true)"
status=0
run="runs/first-$(date +%Y%m%d-%H%M%S)"
env "$RUN_MARK" "$PYTHON" model_zoo/llama/launch.py \
    --workers 8 --config model_zoo/llama/configs/quickstart.yaml --train.steps 160 --optim.warmup 30 --train.eval_every 80 \
    --train.log_dir "$run" --checkpoint.interval 160 --checkpoint.keep_last 1 "$@" || status=$?

pids="$(leftovers)"
if [[ -n "$pids" ]]; then
    echo "quickstart.sh: processes of this run were still alive and are ended now:" $pids >&2
    end_leftovers
    [[ $status -ne 0 ]] || status=1
fi
shm_new="$(comm -13 <(sort <<<"$shm_before") <(ls -A /dev/shm 2>/dev/null | sort || true) | grep -E '^(ms_?dtensor|msdt)' || true)"
if [[ -n "$shm_new" ]]; then
    echo "quickstart.sh: left in /dev/shm:" $shm_new >&2
    [[ $status -ne 0 ]] || status=1
fi
if [[ $status -eq 0 && -f "$run/metrics.jsonl" ]]; then
    echo
    "$PYTHON" -m ms_dtensor plot --text "$run"
    echo
    echo "what the model writes after 'import os', on one rank, from the checkpoint that 8 ranks saved:"
    "$PYTHON" model_zoo/llama/generate.py --from "$run" --prompt "import os" --tokens 110 --temperature 0.6 --seed 3 2>/dev/null |
        sed 's/^/    /'
    "$PYTHON" -c 'import matplotlib' 2>/dev/null && "$PYTHON" -m ms_dtensor plot "$run" >/dev/null && echo && echo "pictures: $run/plots"
    cat <<TEXT

Go on with
  scripts/run_llama.sh 8 quickstart             the long run: 500 steps
  scripts/run_llama.sh 4 quickstart --parallel.tp 2 --train.steps 100 --train.log_dir runs/four    another mesh, same losses
  python model_zoo/llama/train.py --config model_zoo/llama/configs/llama3_8b.yaml --print-config   what a cluster runs
TEXT
fi
exit $status
