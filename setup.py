"""Compiles the native parts. Where that fails, for example without a compiler, kvoffload is installed without them."""

import sysconfig

import numpy
from setuptools import Extension, setup


def extension(name: str, *depends: str) -> Extension:
    folder = "src/kvoffload/native"
    return Extension(
        f"kvoffload.native.{name}",
        [f"{folder}/{name}.pyx"],
        depends=[f"{folder}/{each}" for each in depends],
        include_dirs=[numpy.get_include()],
        # Runs with every numpy that pyproject.toml allows.
        define_macros=[
            ("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"),
            ("NPY_TARGET_VERSION", "NPY_1_24_API_VERSION"),
        ],
        extra_compile_args=["-O3", "-pthread"],
        extra_link_args=["-pthread"],
        optional=True,
    )


EXTENSIONS = [
    extension("_cache", "prefetch.h"),
    extension("_copies", "copying.h"),
    extension("_ghosts", "prefetch.h", "ghosts.h"),
]

# They need the GIL, which builds of Python without it would switch on again for them.
setup(ext_modules=[] if sysconfig.get_config_var("Py_GIL_DISABLED") else EXTENSIONS)
