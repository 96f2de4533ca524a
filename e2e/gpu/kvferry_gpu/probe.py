"""The abilities of this machine, its driver and its GPUs."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import resource
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from . import process

#: The fields for results. The whole output of `nvidia-smi -q` is kept as text.
SMI_FIELDS = (
    "name,driver_version,vbios_version,pci.bus_id,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,memory.total,memory.used,compute_mode,persistence_mode,mig.mode.current,ecc.mode.current,"
    "clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
)


def probe(packed: Path, out: Path) -> dict[str, Any]:
    """Probes the machine, and writes the result to probe.json. The result has the key `unavailable` if there is no GPU,
    and `failed` if the probe itself failed.
    """
    found: dict[str, Any] = {"machine": _machine(), "folder": _folder(out), "nvidia_smi": _smi(out)}
    ended = process.run([str(packed / "bin" / "gpu_probe")], out / "probe.log", 120)
    try:
        found |= json.loads(ended.output[ended.output.index("{") :])
    except ValueError:
        found["failed"] = f"the probe {ended.how}: {ended.output.strip()[-400:]}"
    if "unavailable" not in found and "failed" not in found and not found.get("gpus"):
        found["unavailable"] = "the driver has no GPU"
    (out / "probe.json").write_text(json.dumps(found, indent=2) + "\n")
    return found


def _machine() -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    said: dict[str, Any] = {"kernel": platform.release(), "python": platform.python_version(), "cores": os.cpu_count()}
    said["cores_allowed"] = len(os.sched_getaffinity(0))
    said["memlock_bytes"] = [value if value != resource.RLIM_INFINITY else "unlimited" for value in (soft, hard)]
    said["processor"] = _line("/proc/cpuinfo", "model name")
    said["memory"] = _line("/proc/meminfo", "MemTotal")
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    said["numa_nodes"] = {node.name: _read(node / "cpulist") for node in nodes}
    with contextlib.suppress(OSError):
        said["shared_memory_bytes"] = shutil.disk_usage("/dev/shm").total
    said["nvidia_peermem"] = Path("/sys/module/nvidia_peermem").exists()
    said["nvidia_fs"] = Path("/sys/module/nvidia_fs").exists()
    said["kernel_module"] = _kernel_module(_read(Path("/proc/driver/nvidia/version")))
    said["libcufile"] = _libcufile()
    return said


def _kernel_module(version: str) -> dict[str, str]:
    """The kernel's part of the driver, by the first line that it shows: `open` or `closed` sources."""
    line = next(iter(version.splitlines()), "")
    if "Kernel Module" not in line:
        return {"flavour": "none", "version": line}
    return {"flavour": "open" if "Open Kernel Module" in line else "closed", "version": line}


def _libcufile() -> str:
    """Where cuFile's library is: the loader's, the toolkit's, or Python's package. Empty without one."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, timeout=60, check=False)
        for line in known.stdout.splitlines():
            if line.strip().startswith("libcufile.so"):
                return line.split("=>")[-1].strip()
    folders = [Path(it) for it in os.environ.get("LD_LIBRARY_PATH", "").split(":") if it]
    folders += sorted(Path("/usr/local").glob("cuda*/lib64"))
    folders += sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/lib"))
    return next((str(file) for folder in folders for file in sorted(folder.glob("libcufile.so*"))), "")


def _folder(folder: Path) -> dict[str, Any]:
    """The disk below a folder, where tests with files and the results are."""
    said: dict[str, Any] = {"path": str(folder)}
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    said["file_system"], said["mounted_from"] = _mount(_read(Path("/proc/self/mountinfo")), device)
    # The kernel lists block devices only: file systems in memory, on the network and in layers have none.
    block = Path("/sys/dev/block") / device
    said["block_device"] = block.resolve().name if block.exists() else ""
    said["direct_io"] = _direct_io(folder)
    return said


def _mount(text: str, device: str) -> tuple[str, str]:
    """Kind and source of the file system with this device number."""
    for line in text.splitlines():
        fields, _, kind = line.partition(" - ")
        if fields.split()[2:3] == [device]:
            name, source = [*kind.split(), "", ""][:2]
            return name, source
    return "", ""


def _direct_io(folder: Path) -> str:
    """`yes` if a file of the folder can be written and read past the page cache, else the kernel's error."""
    file = folder / f"direct-io-{os.getpid()}"
    sent = bytes(range(256)) * 16
    try:
        with contextlib.ExitStack() as ended:
            ended.callback(file.unlink, missing_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
            ended.callback(os.close, descriptor)
            # A mapping begins at a page, as such transfers need it.
            memory = ended.enter_context(mmap.mmap(-1, len(sent)))
            memory[:] = sent
            os.pwrite(descriptor, memory, 0)
            memory[:] = bytes(len(sent))
            os.preadv(descriptor, [memory], 0)
            return "yes" if memory[:] == sent else "it reads other bytes than were written"
    except OSError as error:
        return str(error)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _line(file: str, key: str) -> str:
    lines = (line.split(":", 1) for line in _read(Path(file)).splitlines() if ":" in line)
    return next((value.strip() for name, value in lines if name.strip() == key), "")


def _smi(out: Path) -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"unavailable": "nvidia-smi is not here"}
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits"]
    said: dict[str, Any] = {}
    try:
        rows = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        everything = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60, check=False)
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"unavailable": str(error)}
    (out / "nvidia-smi.txt").write_text(everything.stdout + everything.stderr + topology.stdout)
    if rows.returncode == 0:
        names = SMI_FIELDS.split(",")
        said["gpus"] = [dict(zip(names, row.split(", "), strict=False)) for row in rows.stdout.strip().splitlines()]
    else:
        said["refused"] = (rows.stdout + rows.stderr).strip()
    said["bar1_total"] = _bar1(everything.stdout)
    return said


def _bar1(text: str) -> str:
    """The size of the window through which other devices of the bus reach the GPU's memory."""
    _, _, after = text.partition("BAR1 Memory Usage")
    return next((line.split(":")[1].strip() for line in after.splitlines() if line.strip().startswith("Total")), "")


def in_short(found: dict[str, Any]) -> str:
    """One line for a summary."""
    for key in ("failed", "unavailable"):
        if key in found:
            return str(found[key])
    gpu, machine = found["gpus"][0], found["machine"]
    driver = next((it["driver_version"] for it in found["nvidia_smi"].get("gpus", [])), "unknown")
    return (
        f"{len(found['gpus'])} × {gpu.get('name')} (sm {gpu.get('compute_capability')}, {gpu.get('copy_engines')} copy "
        f"engines), driver {driver}, CUDA {found['cuda']}, batch call {found['batch_call']}, "
        f"{machine['cores_allowed']} cores, memlock {machine['memlock_bytes'][0]}, Python {machine['python']}"
    )
