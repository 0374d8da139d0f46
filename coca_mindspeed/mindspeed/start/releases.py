"""Software versions of each supported release of MindSpeed-RL, from its installation guide and requirements."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SoftwareStack:
    """Versions that belong together; ``2.5.1`` includes its builds (:func:`is_version`)."""

    release: str
    driver: str
    cann: str
    megatron: str = "0.12.1"
    # The tested heads of the release branches, and the commits of MindSpeed-RL's guides.
    mindspeed: tuple[str, ...] = ("674226a", "ac9f0e7")
    mindspeed_llm: tuple[str, ...] = ("62d4640", "a2c0733")
    packages: dict[str, str] = field(default_factory=dict)


#: Imported by MindSpeed-RL at start, without a pinned version.
UNPINNED = ("codetiming",)
#: Needed by MindSpeed-LLM's weight converter: for an import, and for transformers' ``device_map``.
CONVERTER = ("peft", "accelerate")

STACKS: dict[str, SoftwareStack] = {
    "2.3.0": SoftwareStack(
        release="2.3.0",
        driver="25.3.0",
        cann="8.5.0",
        packages={
            "torch": "2.5.1",
            "torch_npu": "2.5.1",
            "vllm": "0.9.1",
            "vllm_ascend": "0.9.1",
            "ray": "2.42.1",
            "transformers": "4.52.1",
            "tensordict": "0.1.2",
        },
    ),
    "master": SoftwareStack(
        release="master",
        driver="25.5.0",
        cann="8.5.0",
        packages={
            "torch": "2.7.1",
            "torch_npu": "2.7.1",
            "vllm": "0.11.0",
            "vllm_ascend": "0.11.0",
            "ray": "2.54.0",
            "transformers": "4.57.1",
            "tensordict": "0.8.1",
        },
    ),
}


def is_version(found: str, wanted: str) -> bool:
    """Whether ``found`` is ``wanted`` or a build of it: ``2.5.1.post1`` and ``2.5.1+cpu`` are 2.5.1, 2.5.10 is not."""
    rest = found.removeprefix(wanted)
    return found.startswith(wanted) and not rest[:1].isdecimal()
