# SPDX-License-Identifier: Apache-2.0
"""What a node says about itself before anything runs: is there an NPU, which versions, do they match, how is it wired.

Files and the vendor's commands only; no import of MindSpore, so that a machine without an NPU is told so within a second.
Written by CANN's and MindSpore's documents and tested on trees of files that look like theirs: not run on hardware.
"""
from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HOMES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
SUPPORTED = "mindspore/run_check/_check_version.py, AscendEnvChecker"
LOADS = """import mindspore as ms
print("MindSpore", ms.__version__, "starts for", ms.get_context("device_target"))
ms.set_device("Ascend")
print("set_device: Ascend;", ms.hal.device_count(), "devices,", ms.hal.get_device_name(0))"""


def output(command: list[str], seconds: float = 20) -> str:
    """What a command prints, or why it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        return (done.stdout + done.stderr).rstrip()[-6000:]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def devices(root: Path = Path("/")) -> list[Path]:
    """The device files, one for each NPU that this machine, or this container, was given."""
    return sorted((f for f in (root / "dev").glob("davinci*") if f.name[7:].isdecimal()), key=lambda f: int(f.name[7:]))


def mindspore_folder() -> Path | None:
    """Where MindSpore is installed; it is not imported."""
    spec = importlib.util.find_spec("mindspore")
    return Path(spec.origin).parent if spec and spec.origin else None


def not_found(plugin: Path, ldd: Callable[[list[str]], str] = output) -> list[str]:
    """The libraries that a plug-in needs and the loader cannot find."""
    return list(dict.fromkeys(re.findall(r"^\s*(\S+) => not found", ldd(["ldd", str(plugin)]), re.MULTILINE)))


def missing(root: Path = Path("/"), package: Path | None = None, ldd: Callable[[list[str]], str] = output) -> list[str]:
    """Why nothing can run on an NPU here, a sentence each; empty where all looks well."""
    why, found = [], devices(root)
    if not found:
        why.append("There is no device file /dev/davinci0, nor another: the driver is not installed, or this container was "
                   "started without its devices (docker run --device /dev/davinci0 --device /dev/davinci_manager "
                   "--device /dev/devmm_svm --device /dev/hisi_hdc).")
    if closed := [f.name for f in found if not os.access(f, os.R_OK | os.W_OK)]:
        why.append(f"/dev/{closed[0]} is there and this user may not open it: add the user to the group HwHiAiUser.")
    if package is None:
        return [*why, f"{sys.executable} has no MindSpore: pip install mindspore, or name the right Python in $PYTHON."]
    plugins = sorted((package / "lib/plugin").glob("libmindspore_ascend.so*"))
    if not plugins:
        return [*why, f"The MindSpore in {package} has no plug-in for Ascend (lib/plugin/libmindspore_ascend.so): "
                "install a wheel that was built with it."]
    if lost := not_found(plugins[0], ldd):
        why.append(f"MindSpore's plug-in for Ascend cannot load: {', '.join(lost)} not found. CANN is not installed, or not "
                   "in LD_LIBRARY_PATH: source /usr/local/Ascend/ascend-toolkit/set_env.sh first.")
    return why


def refusal(why: list[str]) -> str:
    """What the script says where it stops at once."""
    return "\n".join(["ascend_first: no NPU can be used here, so nothing was run and nothing is shown.",
                      *(f"  - {reason}" for reason in why),
                      "Mend that, or rehearse on this machine: scripts/ascend_first.sh --rehearse"])


def home(root: Path = Path("/")) -> Path | None:
    """CANN's folder: that of the environment, else the usual ones."""
    named = os.environ.get("ASCEND_HOME_PATH")
    folders = [Path(named)] if named else []
    return next((f for f in (*folders, *(root / h for h in HOMES)) if f.is_dir()), None)


def _version(file: Path) -> str | None:
    """`Version=` of a version.info, or what MindSpore's own operators were compiled with."""
    match = re.search(r"^(?:Version|custom_opp_compiler_version)=\s*(\S+)", file.read_text(errors="replace"), re.MULTILINE)
    return match and match.group(1)


def versions(root: Path = Path("/"), package: Path | None = None) -> tuple[list[str], list[str]]:
    """(lines with the version of everything, what does not match)."""
    found: dict[str, str] = {}
    cann = home(root)
    # 8.x has a folder for each part; 8.5 and later keep these files in share/info
    files = [*(sorted([*cann.glob("*/version.info"), *cann.glob("share/info/*/version.info")]) if cann else []),
             *sorted((root / "usr/local/Ascend").glob("[df]*/version.info"))]
    for file in files:
        found[file.parent.name] = _version(file) or "no line Version="
    built = package / "lib/plugin/ascend/custom_ascendc_910b/version.info" if package else None
    wants = _version(built) if built and built.is_file() else None
    lines = [f"CANN in {cann}", *(f"{name:<12} {version}" for name, version in found.items()),
             f"MindSpore's own operators were compiled with CANN {wants}"]
    apart = {name: ".".join(v.split(".")[:2]) for name, v in found.items() if name not in ("driver", "firmware")}
    wrong = []
    if len(set(apart.values())) > 1:
        wrong.append("parts of CANN are of different versions: " + ", ".join(f"{n} {v}" for n, v in apart.items()))
    if wants and apart and ".".join(wants.split(".")[:2]) not in apart.values():
        wrong.append(f"CANN is {sorted(set(apart.values()))[0]}, MindSpore's own operators are for {wants}")
    if "driver" not in found:
        wrong.append("the driver's version is unknown: /usr/local/Ascend/driver/version.info is not there")
    if not apart:
        wrong.append("CANN's version is unknown: no version.info in its folder")
    return lines, wrong


def plugin_loads(seconds: float = 90) -> tuple[str, bool]:
    """What MindSpore says when it is to start on Ascend, and whether it does, without a word about versions.

    A process of its own: its loader tells which library failed, its check which CANN it was made for (warnings: GLOG_v=2).
    """
    try:
        done = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, timeout=seconds,
                              env={**os.environ, "GLOG_v": "2"})
    except subprocess.TimeoutExpired:
        return f"MindSpore did not start on Ascend within {seconds:g} s", False
    text = (done.stdout + done.stderr)[-6000:]
    if "does not match" in text:
        text += f"\nThe versions that this MindSpore takes are in {SUPPORTED}."
    return text, done.returncode == 0 and "does not match" not in text


def wiring(count: int) -> list[list[str]]:
    """The commands that tell topology and links: `npu-smi` of the driver, `hccn_tool` of its network."""
    return [["npu-smi", "info"], ["npu-smi", "info", "-l"], ["npu-smi", "info", "-t", "topo"],
            *(["hccn_tool", "-i", str(i), *what] for i in range(count)
              for what in (("-link", "-g"), ("-net_health", "-g"), ("-ip", "-g"))), ["lscpu"]]


def plog(folder: Path, most: int = 40) -> str:
    """How much CANN logged for the host below a folder (ASCEND_PROCESS_LOG_PATH), and its last lines of ERROR."""
    files = sorted(folder.rglob("plog-*.log"), key=lambda f: f.stat().st_mtime_ns)
    errors = [line for f in files for line in f.read_text(errors="replace").splitlines() if line.startswith("[ERROR]")]
    if not files:
        return "plog: CANN wrote none"
    return "\n".join([f"plog: {len(files)} files, {len(errors)} lines of ERROR" + (", the last:" if errors else ""),
                      *(line[:400] for line in errors[-most:])])
