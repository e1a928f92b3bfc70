"""Which folders are packages; everything else about the distribution is in pyproject.toml."""

from setuptools import find_packages, setup

# Folders at the top become the packages below ``penstock``. The laboratory is for clones alone.
PARTS = ("kernels", "ops", "producer", "shared", "worker")
setup(
    packages=[
        f"penstock.{name}"
        for part in PARTS
        for name in find_packages(include=[part, f"{part}.*"], exclude=["ops.lab", "ops.lab.*"])
    ]
)
