# SPDX-License-Identifier: Apache-2.0
"""Package metadata. Tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    # Read as text: importing the package would need MindSpore before it is installed.
    text = (ROOT / "ms_dtensor" / "core" / "version.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


setup(
    name="ms_dtensor",
    version=version(),
    description="DTensor for MindSpore: write a model for one device, run it on many, with the same numbers.",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["mindspore", "dtensor", "distributed training", "tensor parallel", "fsdp", "ascend"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["ms_dtensor", "ms_dtensor.*"]),
    # py.typed: or type checkers would ignore every annotation of the installed package; machines: what `suggest` knows;
    # known.json: what others published, for `bench`
    package_data={"ms_dtensor": ["py.typed", "debug/predict/machines/*.yaml", "tools/bench/known.json"]},
    # MindSpore's wheels start at 3.9; dataclass(slots=True) needs 3.10.
    python_requires=">=3.10,<3.13",
    install_requires=[
        "mindspore>=2.10",  # no upper bound: ms_dtensor/internals/probes.py refuses what differs
        "numpy>=1.26,<2",
        "ml_dtypes",
        "safetensors",
        "PyYAML",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-timeout", "hypothesis"],
        "dev": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-PyYAML", "setuptools", "matplotlib",
                "tokenizers>=0.19"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.29"],
        "plot": ["matplotlib"],
        "rich": ["rich"],  # colours on a terminal
        "tokenizers": ["tokenizers>=0.19"],  # for text that is not byte-level
        "data": ["datasets", "pyarrow<26"],  # Hugging Face's; pyarrow 26 needs NumPy 2
        "track": ["tensorboard"],
        "wandb": ["wandb"],
        "swanlab": ["swanlab"],
        "hf": ["transformers==4.57.6", "torch==2.13.0"],  # for tests: what it saves, and what it says of what we saved
        "bench": ["torch==2.13.0"],
        "third_party": ["mindcv==0.3.0"],  # for tests of the night: models that nobody here wrote
        # Empty on purpose: the release on PyPI (0.1.0, 2023) fails to import under MindSpore 2.10 (seen 2026-11).
        "msadapter": [],
    },
)
