"""Compiles the native parts. Where that fails, for example without a compiler, the package is installed without them."""

import numpy
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvoffload.native._cache",
            ["src/kvoffload/native/_cache.pyx"],
            depends=["src/kvoffload/native/prefetch.h"],
            include_dirs=[numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=["-O3"],
            optional=True,
        ),
        Extension(
            "kvoffload.native._ghosts",
            ["src/kvoffload/native/_ghosts.pyx"],
            depends=["src/kvoffload/native/prefetch.h", "src/kvoffload/native/ghosts.h"],
            include_dirs=[numpy.get_include()],
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ]
)
