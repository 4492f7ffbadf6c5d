"""Which packages there are; all else about the distribution is in pyproject.toml.

The top-level folders ship as sub-packages of dpro: the recorder runs inside other people's processes, where a
module called `replay` or `collectors` is likely to exist already.
"""

from setuptools import find_packages, setup

FOLDERS = {"dpro": "dpro"} | {
    f"dpro.{folder}": folder for folder in ("collectors", "dashboards", "replay", "sample_traces")
}
PACKAGES = {*FOLDERS} | {
    f"{package}.{inner}" for package, folder in FOLDERS.items() for inner in find_packages(folder)
}

setup(package_dir=FOLDERS, packages=sorted(PACKAGES))
