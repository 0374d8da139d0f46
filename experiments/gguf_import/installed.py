"""Where an installed package keeps its GGUF file; the package itself is not imported.

``python -m experiments.gguf_import.installed PACKAGE`` prints the path.
"""

import importlib.util
import sys
from pathlib import Path

from coca_mindspeed.errors import CocaError, MissingDependencyError


def gguf_of_package(package: str) -> Path:
    """The one GGUF file in the directory of an installed package.

    Raises:
        MissingDependencyError: the package is not installed, or holds none or several.
    """
    found = importlib.util.find_spec(package)
    files = [
        path for place in (found and found.submodule_search_locations) or () for path in Path(place).glob("*.gguf")
    ]
    if len(files) != 1:
        raise MissingDependencyError(
            f"the package {package} should be installed and hold one GGUF file, found {len(files)}; "
            "make real installs SmolLM2's (requirements/real.txt)"
        )
    return files[0]


if __name__ == "__main__":
    try:
        print(gguf_of_package(sys.argv[1]))
    except CocaError as error:
        sys.exit(f"coca-mindspeed: {error}")
