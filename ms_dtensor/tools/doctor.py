# SPDX-License-Identifier: Apache-2.0
"""`python -m ms_dtensor doctor`: is this machine ready to train, and if not, what mends it.

MindSpore is imported in a process of its own, so that a crash of it is a finding too. The invariant: nothing is changed, and
everything that is opened is closed again.
"""
from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from ..core.refused import refused
from ..errors import ConfigError

DESCRIPTION = """\
Looks whether this machine is ready to train with ms_dtensor.

Each line says what was looked at and what was found: ok, note (not needed, or a matter of taste), warn (works, but),
FAIL (does not work); below the last two stands what mends it. Exit code 1 if anything failed."""
GIB = 2**30
Status = Literal["ok", "note", "warn", "fail"]


class Finding(NamedTuple):
    """What one check found."""

    name: str
    status: Status
    found: str
    fix: str = ""


def _python() -> Finding:
    version = platform.python_version()
    good = (3, 10) <= sys.version_info[:2] < (3, 13)
    return Finding("Python", "ok" if good else "fail", f"{version}, {sys.executable}",
                   "" if good else "MindSpore 2.10 has wheels for Python 3.10, 3.11 and 3.12: python3.11 -m venv .venv")


def _numpy() -> Finding:
    version = _version("numpy")
    good = version is not None and version >= (1, 26) and version < (2,)
    return Finding("NumPy", "ok" if good else "fail", _text("numpy"), "" if good else 'pip install "numpy>=1.26,<2"')


def _protobuf() -> Finding:
    version = _version("protobuf")
    if version is None or _version("mindspore") is None or version >= (7, 34):
        return Finding("protobuf", "ok" if version else "note", _text("protobuf"))
    return Finding("protobuf", "fail", f"{_text('protobuf')}: MindSpore 2.10 cannot be imported with it",
                   'pip install "protobuf>=7.34.1" (some packages, SwanLab among them, put an older one in its place)')


_PATIENCE = 120  # seconds for MindSpore's start
_ANSWER = 20  # seconds for a driver's command
_ASK = """
import json, mindspore as ms, ms_dtensor as md
from ms_dtensor.internals.target import target
said = {"version": ms.__version__, "target": target(), "wrong": ""}
try:
    said["device"] = ms.hal.get_device_name(0)
    said["devices"] = ms.hal.device_count()
except Exception as error:
    said["device"] = f"{type(error).__name__}: {error}"
try:
    mesh = md.init_device_mesh({"Ascend": "npu", "GPU": "gpu"}.get(said["target"], "cpu"), (1,))
    assert float(md.ones(2, 2, device_mesh=mesh).sum()) == 4
except Exception as error:
    said["wrong"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(said), flush=True)
"""


def _hangs() -> str:
    """What to look at where MindSpore does not start."""
    if Path("/dev/davinci_manager").exists():
        return "npu-smi info: if it does not answer either, the driver hangs, and this machine has to be started again"
    return "time python -c 'import mindspore': a slow disk or a machine at work takes long once; a second run is quicker"


def _mindspore() -> Finding:
    if importlib.util.find_spec("mindspore") is None:
        return Finding("MindSpore", "fail", "not installed", "pip install mindspore==2.10.0 (or the build for your CANN: "
                       "https://www.mindspore.cn/install)")
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "GLOG_v": "3", "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    for name in ("MS_ROLE", "MS_WORKER_NUM", "RANK_ID"):
        env.pop(name, None)
    try:
        done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_PATIENCE, env=env,
                              check=False)
    except subprocess.TimeoutExpired:
        return Finding("MindSpore", "fail", f"{_text('mindspore')}: {sys.executable} was to import it and to add four "
                       f"numbers on a mesh of one rank, which did not end in {_PATIENCE} seconds", _hangs())
    try:
        said = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])
        why = next((line for line in reversed(reason) if "Error" in line), reason[-1])
        return Finding("MindSpore", "fail", f"{_text('mindspore')}, its import fails: {why[:300]}",
                       "pip install --force-reinstall mindspore==2.10.0; for Ascend first: source "
                       "/usr/local/Ascend/ascend-toolkit/set_env.sh")
    found = f"{said['version']} for {said['target']}, {said.get('devices', '?')} x {said['device']}"
    if said["wrong"]:
        return Finding("MindSpore", "fail", f"{found}; {said['wrong'][:400]}", "pip install mindspore==2.10.0")
    return Finding("MindSpore", "ok", f"{found}; works as the library relies on")


def _ascend() -> Finding:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    there = Path("/usr/local/Ascend").is_dir() or home or Path("/dev/davinci_manager").exists()
    if not there:
        return Finding("CANN", "note", "no Ascend software here")
    if not home:
        return Finding("CANN", "fail", "/usr/local/Ascend is there, but ASCEND_HOME_PATH is not set",
                       "source /usr/local/Ascend/ascend-toolkit/set_env.sh")
    told = [p.read_text(errors="replace") for p in (Path(home) / "version.cfg", Path(home) / "compiler/version.info")
            if p.is_file()]
    lines = [line for text in told for line in text.splitlines() if "ersion=" in line]
    version = lines[0].partition("=")[2].strip("[]") if lines else "?"
    driver = _output("npu-smi", "info", "-l")
    if driver is None:
        return Finding("CANN", "fail", f"{version} in {home}; npu-smi is not there, fails, or takes more than {_ANSWER} "
                       "seconds",
                       "install the driver and firmware that this CANN asks for, or add this user to group HwHiAiUser")
    return Finding("CANN", "ok", f"{version} in {home}; {driver.count('NPU ID')} NPUs")


def _cuda() -> Finding:
    driver = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if driver is None:
        return Finding("CUDA", "note", "no NVIDIA driver here")
    return Finding("CUDA", "note", "; ".join(driver.strip().splitlines()[:8])
                   + " (MindSpore 2.10 has no GPU wheel on PyPI: it trains on CPU here)")


def _ports() -> Finding:
    try:
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            probe.listen()
            other.settimeout(5)
            other.connect(probe.getsockname())
    except OSError as error:
        return Finding("ports", "fail", f"127.0.0.1 cannot be reached: {error}", "ip link set lo up; look at firewall rules")
    free = 0
    for port in range(20000, 32000, 600):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                free += 1
            except OSError:
                continue
    if free:
        return Finding("ports", "ok", f"127.0.0.1 answers, {free} of 20 ports looked at between 20000 and 32000 are free")
    return Finding("ports", "fail", "none of 20 ports between 20000 and 32000 is free", "ss -ltnp says who has them")


def _shared_memory() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", "fail", "this system has no memfd_create", "ranks on a CPU need Linux 3.17 or later")
    try:
        handle = os.memfd_create("ms_dtensor-doctor")
        os.truncate(handle, 1 << 20)
        os.close(handle)
    except OSError as error:
        return Finding("shared memory", "fail", f"no memory file can be made: {error}",
                       "ulimit -n 4096; ulimit -f unlimited")
    try:
        space = shutil.disk_usage("/dev/shm")
    except OSError:
        return Finding("shared memory", "warn", "memory files work; there is no /dev/shm",
                       "mount -t tmpfs tmpfs /dev/shm: worker processes of mindspore.dataset use it")
    found = f"memory files work; /dev/shm has {space.free / GIB:.1f} of {space.total / GIB:.1f} GiB free"
    if space.free < GIB:
        return Finding("shared memory", "warn", found, "docker run --shm-size=16g, or mount -o remount,size=16g /dev/shm")
    return Finding("shared memory", "ok", found)


def _msrun() -> Finding:
    beside, path = Path(sys.executable).parent / "msrun", shutil.which("msrun")
    if path is None and not beside.is_file():
        return Finding("msrun", "fail", "neither on PATH nor beside this Python",
                       "pip install mindspore into this environment, then activate it: source .venv/bin/activate")
    if path is None:
        return Finding("msrun", "warn", f"{beside}, which is not on PATH", f"export PATH={beside.parent}:$PATH")
    if beside.is_file() and not beside.samefile(path):
        return Finding("msrun", "warn", f"{path}, of another environment than {sys.executable}",
                       f"export PATH={beside.parent}:$PATH, or its workers run with the other one's packages")
    return Finding("msrun", "ok", path)


def _cores() -> Finding:
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError):
        total = 0.0
    found = f"{mine} of {os.cpu_count()} for this process, {total:.1f} GiB of memory"
    if 0 < total < 4:
        return Finding("cores", "warn", found, "a rank of the smallest recipe takes 0.6 GiB: take fewer ranks")
    return Finding("cores", "ok", f"{found}: up to {max(1, int(total / 0.7))} small ranks by memory" if total else found)


def _files() -> Finding:
    import resource
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= soft < 1024
    return Finding("open files", "warn" if few else "ok", f"at most {soft}", "ulimit -n 4096" if few else "")


def _disk() -> Finding:
    here = Path.cwd()
    free = shutil.disk_usage(here).free
    if not os.access(here, os.W_OK):
        return Finding("disk", "fail", f"{here} cannot be written", "cd to a folder of yours: runs go to ./runs")
    if free < GIB:
        return Finding("disk", "warn", f"{free / GIB:.2f} GiB free in {here}", "checkpoints need 12 bytes a parameter")
    return Finding("disk", "ok", f"{free / GIB:.1f} GiB free in {here}")


def _settings() -> Finding:
    """What ranks would refuse when they start."""
    from ..comm import set_cpu_backend
    from ..comm.agree import check_every
    from ..comm.shm.rendezvous import stated_timeout
    backend = "MS_DTENSOR_CPU_BACKEND"
    there, wrong = {key: value for key, value in sorted(os.environ.items()) if key.startswith("MS_DTENSOR_")}, {}
    for name, check in (("MS_DTENSOR_TIMEOUT", stated_timeout), ("MS_DTENSOR_CHECK_EVERY", lambda: check_every(1)),
                        (backend, lambda: set_cpu_backend(there[backend] or "shm"))):
        try:
            if name in there:
                check()
        except ConfigError as error:
            wrong[name] = f"{name}={there[name][:40]!r}: {error.rule}"
    if wrong:
        return Finding("settings", "fail", " ".join(wrong.values()), f"unset {' '.join(wrong)}")
    return Finding("settings", "ok", " ".join(f"{key}={value}" for key, value in there.items()) or "no MS_DTENSOR_ variable")


def _extras() -> Finding:
    names = {"rich": "bars", "matplotlib": "plot", "tensorboard": "tracker", "wandb": "tracker", "swanlab": "tracker"}
    there = [name for name in names if importlib.util.find_spec(name)]
    missing = [f"{name} ({use})" for name, use in names.items() if name not in there]
    return Finding("extras", "note", ", ".join(there or ["none"])
                   + (f"; not installed: {', '.join(missing)}" if missing else ""))


def fits(config: Path) -> Finding:
    """Whether a recipe's run has the memory that it needs: of a card, or of this machine where there is none."""
    from ..debug.predict import load_hardware
    from ..debug.predict.search import keys
    from .predict import judged, run_of
    args, model = run_of(config)
    ranks, machine, has = args.dp * args.cp * args.tp * args.pp, load_hardware("910b"), "a 64 GB card"
    if not Path("/dev/davinci_manager").exists():
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        machine, has = replace(machine, capacity=total // ranks, communicator=0), f"this machine's memory over {ranks} ranks"
    one, nearest = judged(model, args, machine)
    found = f"a rank of {config} needs {one.bytes / GIB:.1f} GiB by formula; {has}: {machine.capacity / GIB:.1f}"
    if one.bytes <= machine.capacity:
        return Finding("memory", "ok", found)
    return Finding("memory", "fail", found, f"{nearest.plan.world} ranks: {keys(nearest.plan)}" if nearest else
                   "a smaller model, batch or seq; python -m ms_dtensor memory says what takes most")


def _text(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _version(package: str) -> tuple[int, ...] | None:
    words = _text(package).split(".")[:2]
    return tuple(map(int, words)) if all(word.isdigit() for word in words) else None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


CHECKS: tuple[Callable[[], Finding], ...] = (_python, _numpy, _protobuf, _mindspore, _ascend, _cuda, _msrun, _ports,
                                             _shared_memory, _cores, _files, _disk, _settings, _extras)


def findings() -> Iterator[Finding]:
    """What each check finds; one that breaks is a finding too."""
    for check in CHECKS:
        try:
            yield check()
        except Exception as error:
            yield Finding(check.__name__.strip("_"), "warn", f"could not be looked at: {type(error).__name__}: {error}",
                          "report it as a fault of ms_dtensor")


def main(arguments: Sequence[str]) -> int:
    """The command; exit code 1 if a check failed, 2 if there is no such configuration."""
    parser = argparse.ArgumentParser(prog="python -m ms_dtensor doctor", description=DESCRIPTION,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG",
                        help="a recipe's YAML: whether a rank of it has the memory that it needs, too")
    args = parser.parse_args(arguments)
    found: list[Finding] = []
    try:
        plan = [] if args.config is None else [fits(args.config)]
    except ConfigError as error:
        return refused(error, args.json)
    for one in (*plan, *findings()):
        found.append(one)
        if not args.json:
            word = "FAIL" if one.status == "fail" else one.status
            print(f"{word:<5} {one.name + ':':<15} {one.found}", flush=True)
            if one.fix:
                print(f"{'':<5} {'':<15} mend: {one.fix}")
    failed = [one.name for one in found if one.status == "fail"]
    if args.json:
        print(json.dumps({"ready": not failed, "checks": [one._asdict() for one in found]}))
    else:
        print(f"\n{'not ready: ' + ', '.join(failed) if failed else 'ready to train'}")
    return 1 if failed else 0
