"""Processor, memory and GPUs of this machine, from /proc, /sys and small commands; how a process ends with its parent,
and what memory it returns.

Values that cannot be read are None. On Linux everything is known; elsewhere mainly what Python itself knows.
"""

import ctypes
import gc
import mmap
import os
import platform
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# instruction sets that matter to the kernels, as /proc/cpuinfo writes them
X86_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
# name -> (entry of the auxiliary vector: AT_HWCAP or AT_HWCAP2, bit), of Linux
ARM_FEATURES = {
    "asimd": (16, 1),
    "asimddp": (16, 20),
    "i8mm": (26, 13),
    "bf16": (26, 14),
    "sve": (16, 22),
    "sve2": (26, 1),
    "svei8mm": (26, 9),
    "svebf16": (26, 12),
}
# (implementer, part) -> name, of /proc/cpuinfo; Linux tells no other name
ARM_PROCESSORS = {
    ("0x41", "0xd03"): "Arm Cortex-A53",
    ("0x41", "0xd05"): "Arm Cortex-A55",
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd83"): "Arm Neoverse-V3",
    ("0x41", "0xd8e"): "Arm Neoverse-N3",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1A",
}
M_MMAP_THRESHOLD = -3  # of malloc.h
PR_SET_PDEATHSIG = 1  # of prctl
SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # of x86-64 Linux
PARENT_POLL_S = 0.25
_priorities: list[int] = []  # of this process, the last one counts
GROUP_TRIES, GROUP_RETRY_S = 10, 0.1
NO_LIMIT = 1 << 60  # cgroup v1 writes a huge number for "none"


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def cpu_name() -> str:
    """Return the processor's own name."""
    lines = dict(reversed([line.split(":", 1) for line in _read("/proc/cpuinfo").splitlines() if ":" in line]))
    fields = {key.strip(): value.strip() for key, value in lines.items()}
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    if "CPU part" in fields:
        part = fields.get("CPU implementer", ""), fields["CPU part"]
        return ARM_PROCESSORS.get(part, "Arm implementer {}, part {}".format(*part))
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Return the instruction sets that matter to the kernels."""
    words: set[str] = set(_arm_features()) if is_arm() else set()
    for line in _read("/proc/cpuinfo").splitlines():
        if not words and line.startswith(("flags", "Features")):
            words = set(line.partition(":")[2].split())
            break
    if platform.system() == "Darwin":
        names = {
            "avx2": "hw.optional.avx2_0",
            "asimd": "hw.optional.neon",
            "asimddp": "hw.optional.arm.FEAT_DotProd",
            "i8mm": "hw.optional.arm.FEAT_I8MM",
            "bf16": "hw.optional.arm.FEAT_BF16",
        }
        words = {name for name, key in names.items() if _output("sysctl", "-n", key) == "1"}
    known = X86_FEATURES if is_x86() else ARM_FEATURES
    return [name for name in known if name in words]


def _arm_features() -> list[str]:
    """Return the features that Linux grants this process; under emulation /proc/cpuinfo shows the real processor's."""
    try:
        getauxval = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):  # not Linux
        return []
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return [name for name, (entry, bit) in ARM_FEATURES.items() if getauxval(entry) >> bit & 1]


def is_x86() -> bool:
    """Return whether this is a 64-bit x86 processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


def is_arm() -> bool:
    """Return whether this is a 64-bit Arm processor."""
    return platform.machine().lower() in ("aarch64", "arm64")


def request_amx() -> bool:
    """Ask the system for AMX tile registers, for this process and its threads; return whether it grants them."""
    if not (is_x86() and platform.system() == "Linux"):
        return False
    with suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
    return False


def physical_cores() -> int | None:
    """Return the number of groups of sibling threads; cores of one group share arithmetic units."""
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    groups = {text for text in map(_read, paths) if text}
    if platform.system() == "Darwin":
        return int(_output("sysctl", "-n", "hw.physicalcpu") or 0) or None
    return len(groups) or None


def usable_physical_cores() -> int | None:
    """Return the same for the cores that this process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return physical_cores()
    return _count_physical(os.sched_getaffinity(0))


def usable_performance_cores() -> int | None:
    """Return the number of physical cores of the fast kind that this process may run on; None: all are of one kind.

    Linux lists the performance cores of a hybrid x86 processor. Elsewhere a core is slow if its capacity (Arm), or
    its highest frequency, is less than half of the fastest core's.
    """
    if platform.system() == "Darwin":
        fast = int(_output("sysctl", "-n", "hw.perflevel0.physicalcpu") or 0)
        return fast if 0 < fast < (physical_cores() or 0) else None
    if not hasattr(os, "sched_getaffinity"):
        return None
    usable = os.sched_getaffinity(0)
    fast_ones = usable & (_parse_cpu_list(_read("/sys/devices/cpu_core/cpus")) or _fastest(usable))
    return _count_physical(fast_ones) if fast_ones and fast_ones != usable else None


def _fastest(cores: set[int]) -> set[int]:
    """Return the cores with at least half of the highest capacity, or frequency where no capacity is known."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        read = {core: _read(f"/sys/devices/system/cpu/cpu{core}/{name}").strip() for core in cores}
        if read and all(text.isdigit() for text in read.values()):
            speeds = {core: int(text) for core, text in read.items()}
            return {core for core, speed in speeds.items() if 2 * speed >= max(speeds.values())}
    return set()


def _count_physical(cores: set[int]) -> int | None:
    groups = {_read(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores} - {""}
    return len(groups) or None


def _parse_cpu_list(text: str) -> set[int]:
    """Parse the kernel's form of a set of cores: `0-7,16`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def usable_numa_nodes() -> int:
    """Return the number of memory nodes whose cores this process may run on."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    lists = Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    return max(1, sum(bool(_parse_cpu_list(_read(path)) & usable) for path in lists))


def usable_cores() -> int:
    """Return the number of logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota() -> float | None:
    """Return the CPU time limit of the cgroup in cores, or None."""
    quotas = []
    for folder in _cgroups():
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _cgroups_v1("cpu"):
        quota, period = (_read(folder / f"cpu.cfs_{what}_us").strip() for what in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory() -> tuple[int | None, int | None]:
    """Return (total, available) bytes of memory."""
    sizes: dict[str, int] = {}
    for line in _read("/proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            sizes[key] = int(words[0]) * 1024
    if sizes:
        return sizes.get("MemTotal"), sizes.get("MemAvailable")
    return int(_output("sysctl", "-n", "hw.memsize") or 0) or None, None


def resident_bytes() -> int | None:
    """Return the resident memory of this process, where the system reports it."""
    return _process_bytes(1)


def address_space_left() -> int | None:
    """Return the bytes that this process may still map under its limit of address space (ulimit -v); None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit - (_process_bytes(0) or 0)


def _process_bytes(field: int) -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def return_large_blocks() -> None:
    """Let freed blocks of 1 MiB and more go back to the system at once; by default glibc soon keeps them."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def trim_heap() -> None:
    """Return freed memory of any size to the system; glibc keeps what lies between blocks that are in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def raise_open_files(count: int) -> int | None:
    """Raise the soft limit of open files towards `count`, as far as the hard one allows; return it, None if unlimited.

    Child processes that are started later inherit it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    return soft


def set_priority(nice: int, *, with_threads: bool = True) -> None:
    """Give the threads of this process, and those that they start, a priority; on Linux each has its own.

    Where the kernel groups processes by session (autogroup), it shares the cores among the groups first: the leader of
    a session sets the priority of its group, too. A group's may be raised again, a thread's by privileged users only.
    """
    _priorities.append(nice)
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")] if with_threads else []
    except OSError:
        threads = [0]
    for thread in threads:
        with suppress(OSError):  # it has ended, or has a lower one already
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    if os.getsid(0) != os.getpid():
        return
    for _ in range(GROUP_TRIES):
        try:
            Path("/proc/self/autogroup").write_text(str(nice), encoding="ascii")
        except BlockingIOError:  # the kernel takes few changes in a second
            time.sleep(GROUP_RETRY_S)
            continue
        except OSError:  # a system without such groups
            pass
        return


def is_behind_others() -> bool:
    """Return whether this process has a lower priority: each thread that computes delays other processes by a slice."""
    return bool(_priorities) and _priorities[-1] > 0


def can_raise_priority() -> bool:
    """Return whether this process may raise its priority again after lowering it; a thread of its own tries that."""
    results: list[bool] = []

    def attempt() -> None:
        thread = threading.get_native_id()
        try:
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(19, nice + 1))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            results.append(True)
        except OSError:
            results.append(False)

    trial = threading.Thread(target=attempt)
    trial.start()
    trial.join()
    return results == [True]


def exit_with_parent(parent: int) -> None:
    """Let this process end as soon as the process `parent`, which started it, does."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)
    threading.Thread(target=_watch_parent, args=(parent,), name="parent", daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(0)


def memory_limit() -> tuple[int | None, int]:
    """Return (limit or None, bytes used) of the cgroup with the least free memory."""
    limits: list[tuple[int, int]] = []
    for folder, limit, used in [(f, "memory.max", "memory.current") for f in _cgroups()] + [
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes")
    ]:
        top, now = _read(folder / limit).strip(), _read(folder / used).strip()
        if top.isdigit() and int(top) < NO_LIMIT:
            limits.append((int(top), max(0, int(now) - _page_cache(folder)) if now.isdigit() else 0))
    return min(limits, key=lambda limit: limit[0] - limit[1], default=(None, 0))


def _page_cache(cgroup: Path) -> int:
    """Return the bytes of cached files, which count as used and are freed on demand."""
    words = dict(line.split() for line in _read(cgroup / "memory.stat").splitlines() if len(line.split()) == 2)
    names = ("inactive_file", "active_file")
    prefix = "total_" if "total_inactive_file" in words else ""  # version 1, with the groups below
    return sum(int(words[prefix + name]) for name in names if words.get(prefix + name, "").isdigit())


def _cgroups() -> list[Path]:
    """Return the cgroup of this process and those above it (version 2): each may set a limit."""
    root = Path("/sys/fs/cgroup")
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            own = root / line[3:].lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return [root]


def _cgroups_v1(controller: str) -> list[Path]:
    """Return the cgroup of this process in a controller's tree and those above it (version 1).

    In a container the tree often begins at the container's own group, so that the path is not found: its root counts.
    """
    root = Path("/sys/fs/cgroup") / controller
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            own = root / path.lstrip("/")
            return [own, *(parent for parent in own.parents if parent.is_relative_to(root))]
    return [root]


def gpus() -> list[str]:
    """Return one line for each NVIDIA GPU: name, memory, driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    output = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [f"{row[0]}, {row[1]}, driver {row[2]}" for row in rows if len(row) == 3]


def release_code(library: str) -> None:
    """Drop the resident pages of a loaded library's code; where it runs again, they are read from its file again."""
    for line in _read("/proc/self/maps").splitlines():
        addresses, permissions, *_, path = line.split(maxsplit=5) if line.count("/") else ("", "", "")
        if permissions == "r-xp" and path.rpartition("/")[2].startswith(library):
            start, end = (int(address, 16) for address in addresses.split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold the garbage collector: while many objects are made that stay, a tenth of the time is its search in them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            resume_collection()


def resume_collection() -> None:
    """Enable the garbage collector; all objects count as old, or it would search them at the next allocation."""
    if not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()
    gc.enable()
