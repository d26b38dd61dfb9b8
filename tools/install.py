"""What tox installs packages with: pip, after a look at whether llama-cpp-python can be compiled here.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_COMPILED = "llama-cpp-python"
_ADVICE = (
    "llama-cpp-python has to be compiled once, and there is no C and C++ compiler here: install one "
    "(Debian and Ubuntu: apt install build-essential; Fedora: dnf install gcc gcc-c++; macOS: xcode-select --install), "
    "or set CC and CXX to the ones you have"
)


def lacks_compiler() -> bool:
    """Whether no C or no C++ compiler can be found."""
    candidates = (("CC", ("cc", "gcc", "clang")), ("CXX", ("c++", "g++", "clang++")))
    return any(
        not any(
            shutil.which(name) for name in ((os.environ[variable].split()[0],) if os.environ.get(variable) else usual)
        )
        for variable, usual in candidates
    )


def main(arguments: list[str]) -> int:
    """Run pip with the arguments tox gives; 1 and one line of advice where it cannot succeed."""
    pip = [sys.executable, "-m", "pip", "install"]
    if any(argument.startswith(_COMPILED) for argument in arguments) and lacks_compiler():
        # A wheel from an earlier compilation would do, so only a failure to find one is an error.
        try_cached = [*pip, "--dry-run", "--quiet", "--only-binary", ":all:", *arguments]
        if subprocess.run(try_cached, capture_output=True, check=False).returncode:
            print(_ADVICE, file=sys.stderr)
            return 1
    if any(argument.startswith(_COMPILED) for argument in arguments):
        print("installing; compiling llama-cpp-python takes 10 to 15 minutes the first time ...", flush=True)
    return subprocess.run([*pip, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
