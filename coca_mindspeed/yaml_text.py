"""YAML of strangers: whatever PyYAML falls over is one error, in words for the user."""

from pathlib import Path
from typing import Any

import yaml


class YamlError(ValueError):
    """The text is not YAML that can be used; the message says why, without the file's name."""


def read_yaml(path: Path) -> Any:
    """The value of a file's only document; None if it is empty.

    Raises:
        OSError: it cannot be read.
        YamlError: it is not UTF-8, broken, nested too deeply for Python, or holds what YAML takes for a number or a
            date and Python cannot make one of: an integer of more than 4300 digits, the 31st of a thirteenth month.
    """
    return parse_yaml(path.read_bytes())


def parse_yaml(text: bytes) -> Any:
    """The same of a text; see :func:`read_yaml`."""
    try:
        return yaml.safe_load(text.decode("utf-8"))
    except RecursionError as error:
        raise YamlError("nested too deeply") from error
    # UnicodeDecodeError is a ValueError as well; the others are PyYAML's own, of !!timestamp, !!bool and !!int.
    except (ValueError, AttributeError, LookupError, yaml.YAMLError) as error:
        raise YamlError(str(error)) from error
