"""The package list: hicache_ext/ plus two top-level folders that are packaged inside it.

`triton_kernels` must not be installed under that name: SGLang's kernel wheel owns a top-level package of it.
"""

from __future__ import annotations

from setuptools import find_packages, setup

INSIDE = {"hicache_ext.triton_kernels": "triton_kernels", "hicache_ext.patches": "patches"}

packages = find_packages(include=["hicache_ext", "hicache_ext.*"])
for name, folder in INSIDE.items():
    packages += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]

setup(packages=packages, package_dir=INSIDE)
