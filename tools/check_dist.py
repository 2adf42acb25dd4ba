"""Installs the wheel and the source distribution of a folder, each in an empty environment, and runs kvoffload there.

``python tools/check_dist.py FOLDER [PYTHON]``. With PYTHON, that of an environment with vLLM, each is also tried beside
this vLLM: vLLM must find the connector by its name. Ends with an error at the first check that fails. The wheel was
compiled from the source distribution, which is therefore installed without compiling it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
INSTALLED = """
import kvoffload.native
assert (kvoffload.native.describe() == "native code") is {native}, kvoffload.native.describe()
assert str(kvoffload.native.__file__).startswith({prefix!r}), kvoffload.native.__file__
"""
"""Kvoffload is that of the environment, with its native parts or without."""
IN_VLLM = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins
load_general_plugins()
connector = KVConnectorFactory.get_connector_class_by_name("KVOffloadConnector")
assert connector.__module__.startswith("kvoffload."), connector
"""


def check(package: Path, vllm_python: str | None) -> None:
    """Raises CalledProcessError if ``package``, a file, does not install or run."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "environment"
        venv.create(prefix, with_pip=True)
        python = str(prefix / "bin" / "python")
        installed = INSTALLED.format(prefix=str(prefix), native=package.suffix == ".whl")
        say(f"{package.name}: installing it into an empty environment")
        # Python compiles what is imported; pip would compile everything.
        options = ["--quiet", "--no-compile", "--disable-pip-version-check"]
        install = [python, "-m", "pip", "install", *options, str(package)]
        run(install, folder, KVOFFLOAD_NATIVE="0")
        run([python, "-c", installed], folder)
        for command in (
            [str(prefix / "bin" / "kvoffload"), "--version"],
            [python, str(ROOT / "examples" / "embed.py")],
        ):
            say(f"{package.name}: {run(command, folder)}")
        if vllm_python is not None:
            packages = run([python, "-c", PURELIB], folder)
            beside = run([vllm_python, "-c", PURELIB], folder)
            (Path(packages) / "vllm.pth").write_text(f"{beside}\n")
            run([python, "-c", installed + IN_VLLM], folder)
            say(f"{package.name}: vLLM finds KVOffloadConnector")


def run(command: list[str], folder: str, **more: str) -> str:
    """Runs ``command`` outside the checkout and without its code, with ``more`` environment variables. Returns what it
    prints."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_PLUGINS")}
    variables.update(more)
    done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def say(text: str) -> None:
    print(text, flush=True)


def main(folder: Path, vllm_python: str | None = None) -> None:
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if not wheels or not sources:
        sys.exit(f"{folder} has {len(wheels)} wheels and {len(sources)} source distributions: run make dist")
    with ThreadPoolExecutor() as threads:
        list(threads.map(check, wheels + sources, repeat(vllm_python)))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), *(str(Path(each).absolute()) for each in sys.argv[2:3]))
