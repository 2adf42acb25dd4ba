"""Compiles the native parts. Where that fails, for example without a compiler, kvoffload is installed without them.

With ``KVOFFLOAD_NATIVE=0`` nothing is compiled.
"""

import os
import re
import runpy
import sysconfig
from pathlib import Path

import numpy
from setuptools import Extension, setup

FOLDER = "src/kvoffload/native"
native = runpy.run_path(f"{FOLDER}/__init__.py")


def extension(name: str) -> Extension:
    return Extension(
        f"kvoffload.native.{name}",
        [f"{FOLDER}/{name}.pyx"],
        # Each module has the checksum of all sources, so a change of one compiles all of them again.
        depends=[f"{FOLDER}/{each}" for each in native["source_names"]()],
        include_dirs=[numpy.get_include()],
        # Runs with every numpy that pyproject.toml allows.
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_24_API_VERSION"),
            ("KVOFFLOAD_SOURCES", f"{native['sources_checksum']()}u"),
        ],
        extra_compile_args=["-O3", "-pthread"],
        extra_link_args=["-pthread"],
        optional=True,
    )


EXTENSIONS = [extension(name) for name in native["MODULES"]]


def page() -> str:
    """Returns README.md for the page of an index, where relative links lead nowhere: with their paths in place of them.
    The files are in the source distribution."""

    def named(link: re.Match[str]) -> str:
        text, path = link[1], link[2].partition("#")[0]
        return text if path in text.strip("`") else f"{text} ({path})"

    return re.sub(r"!?\[([^]]*)\]\((?!\w+:|#)([^)]+)\)", named, Path("README.md").read_text(encoding="utf-8"))


# They need the GIL, which builds of Python without it would switch on again for them.
unwanted = sysconfig.get_config_var("Py_GIL_DISABLED") or os.environ.get(native["ENVIRONMENT_VARIABLE"]) == "0"
setup(
    ext_modules=[] if unwanted else EXTENSIONS,
    long_description=page(),
    long_description_content_type="text/markdown",
)
