"""Hydra composition, and errors that name file, key, value and the nearest valid name."""

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError
from yaml import YAMLError

from coca_mindspeed.algorithm.methods import METHODS, OTHER_NAMES, method_settings
from coca_mindspeed.config.checks import refuse_groups_in_part, refuse_mindspeed_rls
from coca_mindspeed.config.former_keys import FORMER_KEYS, without_former_keys
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.config.values import facts_of
from coca_mindspeed.errors import (
    UNKNOWN_KEY,
    ConfigError,
    Problem,
    UsageError,
    did_you_mean,
    validation_problems,
)
from coca_mindspeed.utils.custom_code import is_custom, pinned
from coca_mindspeed.utils.text_formats import YamlError, read_yaml, value_of

GROUPS = ("model", "hardware", "parallel", "method", "data")
#: Keys that name a file or a directory of this machine; ``~`` in them is the user's home directory.
PATH_KEYS = ("model.path", "model.megatron_path", "data.train", "data.evaluate", "warm_up.records")
_PATH_OF = {"model": "model.path", "data": "data.train"}
#: Keys that may name an object of the user's own.
OWN_KEYS = ("method.name", "data.grader")
#: Keys that hold a mapping with any names; an override sets the whole mapping.
MAPPING_KEYS = ("model.chat_template_kwargs", "data.columns", "data.evaluate_columns", "data.grader_options")
_MINDSPEED_RLS = frozenset(("megatron_training", "actor_config", "rl_config", "generate_config"))  # its sections
#: The file that verl's own configuration starts from, by its name in ``defaults``.
VERLS_OWN = "ppo_trainer"
_VERL_BASE = "coca_base"
#: How a run writes a key of an upstream, of which ``mindspeed_rl`` is the run's section: see :func:`compose_run`.
UpstreamNames = Callable[[str, object, Mapping[str, Any]], Sequence[str]]
_SHOWN = 200  # characters of an override in a message


def hydra_override(override: str, roots: Sequence[Path]) -> str:
    """The override that Hydra gets; ``roots`` hold the groups' files.

    ``key=value`` sets a key whether or not a YAML file mentions it: the schema, not Hydra, knows the keys.

    Raises UsageError if it is no override, holds several values, or chooses what is not there.
    """
    typed, equals, value = override.partition("=")
    key = typed.lstrip("+~")
    if not key or not (equals or typed.startswith("~")):
        raise UsageError(f"override {override!r}: expected KEY=VALUE")
    if typed in GROUPS:
        known = sorted({path.stem for root in roots for path in (root / key).glob("*.yaml")})
        files = (root / key / f"{value}.yaml" for root in roots)
        if value not in known and value != "null" and not any(file.is_file() for file in files):
            near = did_you_mean(OTHER_NAMES.get(value.lower(), value) if key == "method" else value, known)
            if "/" in value and key in _PATH_OF:
                near = f"; to give a path, write {_PATH_OF[key]}={value}"
            raise UsageError(f"override {override!r}: no such {key}{near}; known: {', '.join(known)}")
        return override
    try:
        several = OverridesParser.create().parse_override(override).is_sweep_override()
    except (HydraException, ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0][:_SHOWN]
        raise UsageError(f"override {override[:_SHOWN]!r}: cannot be read ({reason}); {_HOW_TO_QUOTE}") from error
    if several:
        raise UsageError(f"override {override[:_SHOWN]!r}: expected one value, found several; {_HOW_TO_QUOTE}")
    return override if typed != key or key.startswith("hydra.") else f"++{override}"


_HOW_TO_QUOTE = """quote a text with other characters than letters, digits and /-.:+@%: 'KEY="VALUE"'"""


def unknown_key(section: str, name: str, upstream: Sequence[str] = ()) -> str:
    """Why a key of a section (``""``: the top level) is refused, with the nearest known key.

    ``upstream`` are keys that an upstream's key of this name is written as.
    """
    if (former := FORMER_KEYS.get(f"{section}.{name}".lstrip("."))) is not None:
        return f"unknown key, {former.became}"
    return f"unknown key{near_key(section, name, upstream)}; known: {', '.join(known_keys(section))}"


def near_key(section: str, name: str, upstream: Sequence[str] = ()) -> str:
    """``, did you mean 'x'?`` for the nearest key of ours; may be empty.

    A near name in the key's own section comes before the same name in another one or of an upstream.
    """
    own, every = known_keys(section), [*facts_of(RunConfig)]
    near = difflib.get_close_matches(name, own, n=1, cutoff=0.75) if section else []
    return next(
        filter(
            None,
            (
                did_you_mean(name, own, 1.0),
                _one_of([*near, *upstream, *(key for key in every if key.rpartition(".")[2] == name)]),
                did_you_mean(name, every, 1.0),
                did_you_mean(name, own),
                did_you_mean(name, every, 0.8),
            ),
        ),
        "",
    )


def _one_of(keys: Sequence[str]) -> str:
    return f", did you mean {' or '.join(map(repr, dict.fromkeys(keys)))}?" if keys else ""


def known_keys(section: str) -> list[str]:
    """The keys of a section of the schema, or of the top level (``""``) with the groups; none for no such section."""
    own = [key.rpartition(".")[2] for key in facts_of(RunConfig) if key.rpartition(".")[0] == section]
    return own if section else list(dict.fromkeys((*own, *GROUPS)))


# Interpolations compute defaults with these.
OmegaConf.register_new_resolver("sum", lambda *terms: sum(terms), replace=True)
OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
OmegaConf.register_new_resolver("quotient", lambda a, b: a // b, replace=True)
OmegaConf.register_new_resolver("largest", lambda *values: max(values), replace=True)
OmegaConf.register_new_resolver("if_equal", lambda a, b, value: value if a == b else None, replace=True)


@dataclass(frozen=True)
class ComposedConfig:
    """A run's configuration, and its name or path."""

    run: RunConfig
    name: str

    def to_yaml(self) -> str:
        """The resolved configuration, defaults included."""
        return to_yaml(self.run)


def to_yaml(run: RunConfig) -> str:
    """A run's configuration as YAML that :func:`compose_run` accepts."""
    values = run.model_dump(mode="json")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=110)


def config_directory() -> Path:
    """``configs/`` of the source tree, or its copy inside an installed package."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package.parent / "configs", package / "_configs"):
        if (candidate / "base.yaml").is_file():
            return candidate
    raise ConfigError(f"the configs/ folder was found neither in {package.parent} nor in {package}; reinstall")


def method_form(name: str) -> dict[str, Any]:
    """The section ``method`` of ``configs/method/NAME.yaml``; raises ValueError if there is no such file."""
    files = {path.stem: path for path in (config_directory() / "method").glob("*.yaml")}
    if name not in files:
        raise ValueError(f"no such form of a method{did_you_mean(name, files)}; known: {', '.join(sorted(files))}")
    return dict(read_yaml(files[name]))


def ready_made_runs() -> list[str]:
    """Names that :func:`compose_run` accepts besides paths."""
    return sorted(path.stem for path in config_directory().glob("*.yaml") if path.stem != "base")


def ready_made_verl_runs() -> list[str]:
    """Names of the configurations in ``configs/verl``."""
    return sorted(path.stem for path in (config_directory() / "verl").glob("*.yaml") if path.stem != _VERL_BASE)


def find_verl_run(name: str) -> Path | None:
    """The YAML file of a run on verl, by the name of a ready-made one or by its path; None if it is no run on verl."""
    if name in ready_made_verl_runs():
        return config_directory() / "verl" / f"{name}.yaml"
    path = Path(name).expanduser()
    if path.suffix != ".yaml" or not path.is_file():
        return None
    return path if VERLS_OWN in named_defaults(path.stem, [path.parent, *verl_directories()]) else None


def verl_directories() -> tuple[Path, Path]:
    """Where a file of one's own finds ours: ``coca_qwen25_7b``, or ``verl/coca_qwen25_7b``."""
    return config_directory() / "verl", config_directory()


def describe_run(name: str) -> str:
    """The first sentence of the comment at the head of a ready-made run's file: model, data and hardware."""
    text = ""
    for line in (config_directory() / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        text += line[1:]
    return text.strip().partition(". ")[0].rstrip(".:")


def compose_run(
    name: str,
    overrides: Sequence[str] = (),
    *,
    allow_missing: bool = False,
    upstream: UpstreamNames = lambda key, value, sections: (),
) -> ComposedConfig:
    """Compose and validate a run: a ready-made one (``demo``), or the path of a YAML file that may name our groups.

    ``overrides`` are Hydra's: ``method=joint`` chooses from a group, ``rollout.prompts=64`` sets a key.
    ``allow_missing`` keeps ``???`` as the value of a key that still needs one.  ``upstream(key, value, mindspeed_rl)``
    returns the keys that an upstream's key or section is written as, of which errors tell; empty for any other key.

    Raises ConfigError if the name is unknown, the YAML cannot be composed, or a value is not valid or has no effect.
    """
    path = Path(name).expanduser()
    ours = config_directory()
    is_path = path.suffix in (".yaml", ".yml") or len(path.parts) > 1
    if is_path and not path.is_file():
        raise UsageError(f"{path}: no such configuration file")
    if is_path and path.suffix != ".yaml":
        raise UsageError(f"{path}: expected a file whose name ends in .yaml")
    if not is_path and name not in ready_made_runs():
        raise UsageError(
            f"unknown run {name!r}{did_you_mean(name, ready_made_runs())}; ready-made: {', '.join(ready_made_runs())}"
        )
    directory, stem = (path.resolve().parent, path.stem) if is_path else (ours, name)
    file = directory / f"{stem}.yaml"
    try:
        content = read_yaml(file)  # names file and line, which Hydra's own message hides
    except (OSError, YamlError) as error:
        raise ConfigError(f"{file}: is not valid YAML: {error}") from error
    # Hydra itself would follow a circle to the recursion limit, and knows no near names.
    for default in set(named_defaults(stem, (directory, ours))):
        if "/" not in default and not any((root / f"{default}.yaml").is_file() for root in (directory, ours)):
            near = did_you_mean(default, ready_made_runs())
            wrong = f"its defaults name {default!r}, which is no run of ours and no file beside it{near}"
            raise ConfigError(f"{file}: cannot be composed: {wrong}")
    if is_path and is_mindspeed_rls(file):
        refuse_mindspeed_rls(path)
    if is_path:
        refuse_groups_in_part(content, file, overrides, (directory, ours))
    hydra_overrides = []
    for override in overrides:
        if (key := override.lstrip("+").partition("=")[0]) in MAPPING_KEYS:
            hydra_overrides.append(f"++{key}=null")  # a mapping replaces the file's; Hydra would merge them
        hydra_overrides.append(hydra_override(override, (directory, ours)))
    try:
        composed = _compose(directory, stem, hydra_overrides)
        try:
            values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=not allow_missing)
        except InterpolationResolutionError:
            # If one of our sections holds a value of the wrong type, the error names its key, not the interpolation.
            own = {str(key): composed[key] for key in composed if key != "mindspeed_rl"}
            own = {k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for k, v in own.items()}
            validate_config(own, file, overrides)
            raise
    except MissingMandatoryValue as error:
        if not allow_missing:
            with contextlib.suppress(MissingMandatoryValue):  # an unknown key may be the missing one, misspelt
                _refuse_unknown_keys(_compose(directory, stem, hydra_overrides), file, overrides, upstream)
        missing = error.full_key
        raise UsageError(f"{file}: {missing}=???: needs a value; give it on the command line: {missing}=...") from error
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # ValueError: odd defaults
        if overrides and _composes(directory, stem):
            typed = ", ".join(f"override {override!r}" for override in overrides)
            raise UsageError(f"{typed}: cannot be composed: {error}") from error
        raise ConfigError(f"{file}: cannot be composed: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected a mapping of keys, found {type(values).__name__}")
    run = validate_config({str(k): v for k, v in values.items()}, file, overrides, upstream)
    if run.data.epochs is not None:
        _refuse_unused_steps(run, file, overrides)
    return ComposedConfig(run, name)


def named_defaults(name: str, roots: Sequence[Path], above: Sequence[str] = ()) -> Iterator[str]:
    """The configurations that ``name`` and those below it list under ``defaults``, by their names in Hydra.

    A file is looked for in ``roots``, in this order; a name without a file ends its branch.  Raises ConfigError if a
    file cannot be read, or leads back to a configuration of ``above``.
    """
    file = next((path for root in roots if (path := root / f"{name}.yaml").is_file()), None)
    if file is None:
        return
    if name in above:
        circle = " -> ".join([*above[above.index(name) :], name])
        raise ConfigError(f"{file}: its defaults lead back to it ({circle}); remove one of these entries")
    try:
        content = read_yaml(file)
    except (OSError, YamlError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    entries = content.get("defaults") if isinstance(content, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        group, choice = next(iter(entry.items()), ("", None)) if isinstance(entry, dict) else ("", entry)
        if isinstance(choice, str) and choice != "_self_" and not str(group).startswith("override "):
            below = PurePosixPath("/", name).parent / str(group).removeprefix("optional ") / choice.partition("@")[0]
            yield (below_name := str(below.relative_to("/")))
            yield from named_defaults(below_name, roots, (*above, name))


def is_mindspeed_rls(file: Path) -> bool:
    """Whether a YAML file is in MindSpeed-RL's own layout.

    A file that stands on a run of ours is not: it holds MindSpeed-RL's sections in the wrong place.  Raises ConfigError
    if a file of its defaults cannot be read.
    """
    named, content = set(named_defaults(file.stem, [file.parent])), read_yaml(file)
    has_section = isinstance(content, dict) and not _MINDSPEED_RLS.isdisjoint(content)
    return has_section and named.isdisjoint({"base", *ready_made_runs()})


def _refuse_unused_steps(run: RunConfig, file: Path, overrides: Sequence[str]) -> None:
    """Refuse a ``trainer.steps`` that was set over a ``data.epochs``, which decides the length alone."""
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    steps, epochs = (value_of(read_yaml(file), key) for key in ("trainer.steps", "data.epochs"))
    if "trainer.steps" in typed or (steps and not epochs and "data.epochs" not in typed):
        reason = f"has no effect beside data.epochs={run.data.epochs:g}"
        problem = Problem("no-effect", "trainer.steps", run.trainer.steps, reason, "set data.epochs=null too")
        kind = UsageError if "trainer.steps" in typed else ConfigError
        raise kind(f"{_origin(problem.key, file, overrides)}: {problem}", [problem])


def _compose(directory: Path, stem: str, overrides: Sequence[str]) -> DictConfig:
    """Compose a file with overrides."""
    with initialize_config_dir(str(directory), version_base="1.3"):
        composed = compose(stem, overrides=[*_search_path(directory), *overrides])
    _add_defaults(composed)
    _change_texts(composed, PATH_KEYS, _expanded)
    _change_texts(composed, OWN_KEYS, partial(_pinned, directory))
    return composed


def _search_path(directory: Path) -> list[str]:
    ours = config_directory()
    escaped = str(ours).replace("'", "\\'")
    return [] if directory == ours else [f"hydra.searchpath=['file://{escaped}']"]


def _composes(directory: Path, stem: str) -> bool:
    """Whether the file composes by itself, with or without keys that still need a value."""
    try:
        OmegaConf.to_container(_compose(directory, stem, ()), resolve=True, throw_on_missing=True)
    except MissingMandatoryValue:
        return True
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError):
        return False
    return True


def validate_config(
    values: dict[str, Any],
    file: Path,
    overrides: Sequence[str] = (),
    upstream: UpstreamNames = lambda key, value, sections: (),
) -> RunConfig:
    """Check a mapping that was composed of a run's ``file`` against the schema; ``upstream`` as of :func:`compose_run`.

    Former keys without an effect are left out.  Raises ConfigError with every problem, a line each, with the file (or
    override), key, value and nearest valid name.
    """
    typed = [override.lstrip("+~").partition("=")[0] for override in overrides]
    try:
        return RunConfig.model_validate(without_former_keys(values, file, typed))
    except ValidationError as error:
        sections = values.get("mindspeed_rl")
        sections = sections if isinstance(sections, Mapping) else {}
        problems = [
            _explained(problem, upstream(problem.key, problem.value, sections))
            for problem in validation_problems(error)
        ]
        origins = [_origin(problem.key, file, overrides) for problem in problems]
        kind = UsageError if all(origin.startswith("override ") for origin in origins) else ConfigError
        lines = [f"{origin}: {problem}" for origin, problem in zip(origins, problems, strict=True)]
        raise kind("\n".join(lines), problems) from error


def _refuse_unknown_keys(composed: DictConfig, file: Path, overrides: Sequence[str], upstream: UpstreamNames) -> None:
    """Raise ConfigError for keys that the schema lacks, of a configuration whose other values may be missing."""
    values = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(values, dict)
    try:
        validate_config({str(k): v for k, v in values.items()}, file, overrides, upstream)
    except ConfigError as error:
        unknown = [problem for problem in error.problems if problem.code == UNKNOWN_KEY]
        lines = [f"{_origin(problem.key, file, overrides)}: {problem}" for problem in unknown]
        if unknown:
            raise type(error)("\n".join(lines), unknown) from error


def _explained(problem: Problem, upstream: Sequence[str]) -> Problem:
    """A problem of the schema, with how the key is written; ``upstream`` as of :func:`unknown_key`."""
    if problem.key in GROUPS and isinstance(problem.value, str):
        return problem._replace(expected=f"a group: write `- override {problem.key}: {problem.value}` under defaults")
    if problem.code != UNKNOWN_KEY:
        return problem
    if upstream and isinstance(problem.value, Mapping):
        return problem._replace(expected=f"a section of MindSpeed-RL: write {' and '.join(upstream)}")
    return problem._replace(expected=unknown_key(*problem.key.rpartition(".")[::2], upstream))


def _add_defaults(composed: DictConfig) -> None:
    """Add what no YAML file mentions, so that interpolations may refer to any key of the schema."""
    with open_dict(composed):
        every = RunConfig().model_dump(mode="json") | {"method": _method_defaults(composed.get("method"))}
        for section, defaults in every.items():
            if section not in composed:
                composed[section] = defaults
            elif isinstance(defaults, dict) and OmegaConf.is_dict(composed[section]):
                present = composed[section].keys()  # `in` would be false for a key whose value is still missing
                for key in defaults:
                    if key not in present:
                        composed[section][key] = defaults[key]


def _method_defaults(section: Any) -> dict[str, Any]:
    """The defaults of the settings of the method that a section names."""
    name = section.get("name") if OmegaConf.is_dict(section) and not OmegaConf.is_missing(section, "name") else None
    return asdict(method_settings(name if name in METHODS else "coca"))


def _change_texts(composed: DictConfig, keys: Sequence[str], change: Callable[[str], str]) -> None:
    """Replace the texts of ``keys``, before other keys are made of them."""
    for section, _, key in (name.rpartition(".") for name in keys):
        values = OmegaConf.select(composed, section)
        if OmegaConf.is_dict(values) and not OmegaConf.is_missing(values, key) and isinstance(values.get(key), str):
            raw = OmegaConf.to_container(values, resolve=False)
            assert isinstance(raw, dict)
            if (changed := change(raw[key])) != raw[key]:
                values[key] = changed


def _expanded(path: str) -> str:
    """Read ``~`` as the user's home directory."""
    return str(Path(path).expanduser()) if path.startswith("~") else path


def _pinned(directory: Path, name: str) -> str:
    """Name a file of the user's own by its absolute path and fingerprint; the schema refuses one that is not there."""
    with contextlib.suppress(ValueError):
        return pinned(name, directory) if is_custom(name) and "${" not in name else name
    return name


def _origin(key: str, file: Path, overrides: Sequence[str]) -> str:
    """The override that sets ``key`` or its section, else the run's file."""
    for override in reversed(overrides):
        named = override.lstrip("+~").split("=", 1)[0]
        if f"{key}.".startswith(f"{named}.") or named.startswith(f"{key}."):
            return f"override {override[:_SHOWN]!r}"
    return str(file)
