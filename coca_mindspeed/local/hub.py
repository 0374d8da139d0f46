"""Models of the Hugging Face hub, in huggingface_hub's own cache."""

import sys
from pathlib import Path

from coca_mindspeed.config.checks import download_command
from coca_mindspeed.errors import ConfigError, Problem
from coca_mindspeed.utils.console import print_text

_FILES = (".json", ".jinja", ".model", ".txt", ".safetensors")
_ELSEWHERE = "or name a directory"


def download_model(name: str, *, own_code: bool, show_progress: bool) -> Path:
    """The directory of the model ``name`` (ORG/NAME), downloaded if the cache lacks some of its newest files.

    ``own_code`` also downloads the model's Python files.  Without a connection, the newest copy in the cache is used.

    Raises:
        ConfigError: there is no such model, it needs a login, or it can be neither downloaded nor found in the cache.
    """
    from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not show_progress:
        disable_progress_bars()
    fix = f"check the name and the connection, {_ELSEWHERE}: {download_command(name, name)}"
    try:
        info = HfApi().model_info(name, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = _wanted(list(sizes), own_code)
        cached = [file for file in wanted if isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)]
        if (missing := sum(sizes[file] for file in wanted if file not in cached)) and show_progress:
            size = f"{missing / 1e6:,.0f} MB"
            print_text(f"downloading {name} ({size}) from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}", sys.stderr)
        return Path(snapshot_download(name, allow_patterns=wanted))
    except GatedRepoError:
        reason, fix = "is gated on the hub", f"accept its licence there and run hf auth login, {_ELSEWHERE}"
    except RepositoryNotFoundError:
        reason = f"is neither a directory nor a model on {constants.ENDPOINT}"
    # huggingface_hub, requests and httpx each raise their own kinds when there is no network.
    except Exception as error:  # noqa: BLE001
        try:
            found = snapshot_download(name, local_files_only=True)
            print_text(f"{constants.ENDPOINT} cannot be reached; {name} is read from the cache, {found}", sys.stderr)
            return Path(found)
        except Exception:  # noqa: BLE001
            cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
            reason = f"can be neither read from {constants.ENDPOINT} ({cause}) nor found in {constants.HF_HUB_CACHE}"
    problem = Problem("no-model", "model.path", name, reason, fix)
    raise ConfigError(str(problem), [problem])


def _wanted(files: list[str], own_code: bool) -> list[str]:
    """The files of a Hugging Face directory: no folders, no second copies of the weights in other formats."""
    suffixes = (*_FILES, ".py") if own_code else _FILES
    if not any(name.endswith(".safetensors") for name in files):
        suffixes = (*suffixes, ".bin")
    return [
        name for name in files if name.endswith(suffixes) and "/" not in name and not name.startswith("consolidated")
    ]
