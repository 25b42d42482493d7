"""Makes `.venv-npu` a machine with an emulated Ascend NPU: `make test-npu` has its interpreter run this file.

The environment is a layer over `.venv`: the same packages at the same versions (their folder is the one argument), and
the real torch_npu wheel on top.
What the wheel wants of Ascend's runtime is built here from `cann/*.c`; every other symbol that its libraries name is
written as a stub that names itself and fails. A path file loads these libraries before anything else does, and an entry
point of torch puts `tests.npu.emulated` behind the device, so that any program of this interpreter has an NPU.
"""

from __future__ import annotations

import site
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARIES = ("ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "hccl")
"""What torch_npu is linked with. The first of them holds the runtime, the last the collectives."""
LINKED = ("libtorch_npu.so", "libnpu_profiler.so", "libtensorpipe.so")
VERSION = "0.emulated"
PREFIXES = ("acl", "Hccl", "Msprof", "rt")

UNKNOWN = """\
int {name}(void) {{
    static const char text[] = "emulated CANN: {name} is not part of it\\n";
    fputs(text, stderr);
    return 207000;
}}
"""

LOADED = """\
import ctypes, os, sys

os.environ["TASK_QUEUE_ENABLE"] = "0"  # operators run where they are called
os.environ["ASCEND_HOME_PATH"] = os.environ["ASCEND_OPP_PATH"] = {folder!r}
sys.path.insert(0, {root!r})
for name in {names!r}:
    ctypes.CDLL(f"{folder}/lib{{name}}.so", ctypes.RTLD_GLOBAL)
"""


def wanted(wheel: Path) -> set[str]:
    """The symbols that the wheel's libraries expect of Ascend's."""
    files = [*(wheel / "lib" / name for name in LINKED), *wheel.glob("_C*.so")]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *files], check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in listed.splitlines() if line.strip() and not line.endswith(":")}
    return {name for name in names if name.startswith(PREFIXES) and "@" not in name}


def defined(library: Path) -> set[str]:
    """The symbols that a library has."""
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}


def compiled(out: Path, *sources: Path) -> Path:
    """A shared library of C sources and of the libraries it stands for, known to the loader by its file's name."""
    flags = [
        "-Wl,--no-as-needed",
        "-O1",
        "-std=gnu11",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{out.name},-rpath,$ORIGIN",
        "-Wall",
        "-Wno-unused-parameter",
    ]
    subprocess.run(["cc", *flags, "-o", out, *sources], check=True)
    return out


def build(wheel: Path, folder: Path) -> None:
    """The libraries that torch_npu is linked with."""
    folder.mkdir(parents=True, exist_ok=True)
    first, *empty, last = LIBRARIES
    hccl = compiled(folder / f"lib{last}.so", HERE / "cann" / f"{last}.c")
    acl = compiled(folder / f"lib{first}.so", HERE / "cann" / "acl.c")
    missing = sorted(wanted(wheel) - defined(acl) - defined(hccl))
    stubs = folder / "stubs.c"
    stubs.write_text("#include <stdio.h>\n" + "".join(UNKNOWN.format(name=name) for name in missing))
    compiled(acl, HERE / "cann" / "acl.c", stubs)
    (folder / "none.c").write_text("")
    for name in empty:
        compiled(folder / f"lib{name}.so", folder / "none.c", acl)
    for name in ("runtime", "compiler"):  # what torch_npu looks for before it loads
        (folder / name).mkdir(exist_ok=True)
    (folder / "ascend_emulated_install.info").write_text(f"version={VERSION}\n")
    print(f"emulated CANN in {folder}: {len(missing)} of {len(wanted(wheel))} symbols are stubs that fail")


def attach(packages: Path, below: Path, folder: Path) -> None:
    """Have every interpreter of this environment load the libraries at its start, and the kernels with torch."""
    (packages / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    (packages / "emulated_npu.pth").write_text("import emulated_npu\n")
    (packages / "emulated_npu.py").write_text(LOADED.format(root=str(ROOT), folder=str(folder), names=LIBRARIES))
    facts = packages / "emulated_npu-0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-npu\nVersion: 0\n")
    (facts / "entry_points.txt").write_text("[torch.backends]\nemulated_npu = tests.npu.emulated:autoload\n")


def main() -> None:
    """Build and attach."""
    spec = find_spec("torch_npu")
    assert spec is not None and spec.origin is not None, f"torch_npu is not installed for {sys.executable}"
    folder = Path(sys.prefix) / "cann"
    build(Path(spec.origin).parent, folder)
    attach(Path(site.getsitepackages()[0]), Path(sys.argv[1]), folder)


if __name__ == "__main__":
    main()
