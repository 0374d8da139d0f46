"""A training that was begun while the reproduction's directory had another name: a relative one, or another place."""

from pathlib import Path

from coca_mindspeed.config.compose import to_yaml, validate_run
from coca_mindspeed.config.schema import RunConfig
from coca_mindspeed.files import write_atomically
from coca_mindspeed.yaml_text import YamlError, read_yaml

# What a cell names inside of the reproduction's directory.
_PLACES = (("model", "path"), ("data", "train"), ("data", "evaluate"))


def follow_renaming(run: Path, config: RunConfig, output: Path) -> None:
    """Let the saved configuration of a cell's training name the files of ``output`` as ``config`` does.

    A training is gone on with only under the settings that it was begun with, and by another name the same file would
    be another.  Which file is meant is told by its place in the reproduction's directory, which the training lies in.

    Args:
        run: the training's directory, inside of ``output``; it may not be there yet.
        config: by which it is to go on.
        output: the reproduction's directory, as it is called now.

    Raises:
        ConfigError: what is saved is no configuration of a run.
    """
    path = run / "config.yaml"
    if not path.is_file():
        return
    try:
        values = read_yaml(path)
    except (OSError, YamlError):
        return  # the session says what is wrong with it
    found = saved = validate_run(values, (path,))
    for section, key in _PLACES:
        now, before = (getattr(getattr(of, section), key) for of in (config, saved))
        if now is None or before in (None, now) or not Path(now).is_relative_to(output):
            continue
        inside = Path(now).relative_to(output).parts
        if Path(before).parts[-len(inside) :] == inside:
            changed = getattr(saved, section).model_copy(update={key: now})
            saved = saved.model_copy(update={section: changed})
    if saved != found:
        write_atomically(path, to_yaml(saved))
