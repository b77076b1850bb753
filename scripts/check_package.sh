#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds sdist and wheel, installs the wheel into an empty environment, and runs README's example from there on 4 ranks, outside
# of the checkout. Prints how long each part took.   scripts/check_package.sh [python]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${1:-python3.11}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH VIRTUAL_ENV
begun=$SECONDS
said() { # what was done since the last call
    echo "check_package.sh: $1: $((SECONDS - begun)) s"
    begun=$SECONDS
}

mkdir "$work/source"
(cd "$root" && git ls-files -z -co --exclude-standard | tar -c --null -T - | tar -x -C "$work/source")
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install --quiet --disable-pip-version-check build twine 2>/dev/null
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"$work/build/bin/python" -m twine check --strict "$work/dist"/*
said "sdist, and the wheel that was built from it"

"$python" - "$work/dist" <<'PY'
import pathlib, sys, tarfile, zipfile
dist = pathlib.Path(sys.argv[1])
wheel, = dist.glob("*.whl")
sdist, = dist.glob("*.tar.gz")
names = zipfile.ZipFile(wheel).namelist()
inside = {n for n in names if n.endswith(".py")}
source = {n.split("/", 1)[1] for n in tarfile.open(sdist).getnames() if "/ms_dtensor/" in n and n.endswith(".py")}
assert inside == source, inside ^ source
assert "ms_dtensor/py.typed" in names and any(n.endswith("LICENSE") for n in names)
assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"ms_dtensor"}, "only the package"
print(f"{wheel.name}: {len(inside)} modules, {wheel.stat().st_size / 1024:.0f} KiB; {sdist.name}: {sdist.stat().st_size / 1024:.0f} KiB")
PY

"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$work"/dist/*.whl
said "the wheel into an empty environment"

export PATH="$work/venv/bin:$PATH" GLOG_v=3
mkdir "$work/elsewhere" && cd "$work/elsewhere"
sed -n '/^```python$/,/^```$/p' "$root/README.md" | sed '/^```/d' >demo.py
msrun --worker_num=4 --local_worker_num=4 --join=True --log_dir=logs demo.py
grep -q 'DTensor(f32\[8@dp, 64\], mesh=(dp=2, tp=2)' logs/worker_0.log
python -c "import ms_dtensor, pathlib; assert '$work' in ms_dtensor.__file__; print('ran', ms_dtensor.__version__, 'from', ms_dtensor.__file__)"
python -m ms_dtensor --help >/dev/null
said "README's example on 4 ranks"
python -m ms_dtensor doctor
python -m ms_dtensor verify --form ops.add >verified.json
grep -q '"wrong": \[\]' verified.json
said "doctor, and a rule proven by the wheel alone"
python -m ms_dtensor bench --suite toy --out bench --json >bench.json
python - <<'PY'
import json
told = json.load(open("bench.json"))
assert told["done"] == told["pieces"] == 5 and not told["failed"], told
PY
! python -m ms_dtensor bench --suite toy --out bench --only llama 2>refused || exit 1
grep -q "  fix:  say the command in a checkout" refused
said "bench at toy size on two ranks; what needs a checkout is refused"
