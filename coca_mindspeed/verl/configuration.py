"""A verl configuration as verl would compose it, where verl is installed; else what our own files say of it.

What neither says has verl's default, which :mod:`.required_keys` knows for the keys that matter.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from coca_mindspeed.config.compose import config_directory
from coca_mindspeed.errors import ConfigError, UsageError
from coca_mindspeed.yaml_text import YamlError, read_yaml

#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_BASE = "coca_base"


def ready_made_verl_runs() -> list[str]:
    """Names of the configurations in ``configs/verl``."""
    return sorted(path.stem for path in (config_directory() / "verl").glob("*.yaml") if path.stem != _BASE)


def find_verl_run(name: str) -> Path | None:
    """The YAML file of a run on verl: a ready-made one by its name, or a path; None if it is no run on verl."""
    if name in ready_made_verl_runs():
        return config_directory() / "verl" / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file():
        return None
    return path if VERLS_OWN in _all_defaults(path) else None


def verl_configuration(file: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Compose a run, as plain containers, interpolations resolved.

    Args:
        file: of :func:`find_verl_run`.
        overrides: Hydra's ``key=value``, ``+key=value`` and so on, as verl takes them.

    Raises:
        ConfigError: it cannot be composed.
    """
    verl = _verls_directory()
    try:
        values = _by_verl(verl, file, overrides) if verl is not None else _by_our_files(file, overrides)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        if overrides:
            raise UsageError(f"{file} with {' '.join(overrides)}: cannot be composed: {error}") from error
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of keys, found {type(values).__name__}")
    return {str(key): value for key, value in values.items()}


def _verls_directory() -> Path | None:
    spec = importlib.util.find_spec("verl")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    return next((Path(folder) / "trainer" / "config" for folder in folders), None)


def _by_verl(verl: Path, file: Path, overrides: Sequence[str]) -> Any:
    search = f"hydra.searchpath=[file://{verl}]"
    with initialize_config_dir(str(file.resolve().parent), version_base=None):
        return OmegaConf.to_container(compose(file.stem, overrides=[search, *overrides]), resolve=True)


def _by_our_files(file: Path, overrides: Sequence[str]) -> Any:
    """Our files in their order, without verl's."""
    merged = OmegaConf.create()
    for path in _in_order(file):
        content: Any = OmegaConf.load(path)
        if OmegaConf.is_dict(content):
            content.pop("defaults", None)
        merged.merge_with(content)
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.is_delete():
            raise UsageError(f"{override.input_line}: a key can be taken away only where verl is installed")
        OmegaConf.update(merged, override.key_or_group, override.value(), force_add=True)
    return OmegaConf.to_container(merged, resolve=True)


def _in_order(file: Path) -> list[Path]:
    """The files that a file's ``defaults`` name beside it, and itself where they say ``_self_`` (else at the end)."""
    found, own = [], False
    for name in _defaults(file):
        if name == "_self_":
            found.append(file)
            own = True
        elif (named := file.parent / f"{name}.yaml").is_file():
            found += _in_order(named)
    return found if own else [*found, file]


def _all_defaults(file: Path) -> set[str]:
    found: set[str] = set()
    for name in _defaults(file):
        found.add(name)
        if name != "_self_" and (named := file.parent / f"{name}.yaml").is_file():
            found |= _all_defaults(named)
    return found


def _defaults(file: Path) -> list[str]:
    try:
        content = read_yaml(file)
    except (OSError, YamlError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    defaults = content.get("defaults", []) if isinstance(content, dict) else []
    return [name for name in defaults if isinstance(name, str)] if isinstance(defaults, list) else []
