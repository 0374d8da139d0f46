"""Whether the verl of this process is one whose definitions we know: those that ours override, replace or lean on."""

from pathlib import Path

from coca_mindspeed.upstream.manifest import Manifest, matching_manifest


def known_release() -> Manifest:
    """The manifest of the verl that is imported here.

    Raises:
        ManifestError: a definition differs from every release that is known.
    """
    import verl

    return matching_manifest(Path(str(verl.__file__)).parents[1], package="verl")
