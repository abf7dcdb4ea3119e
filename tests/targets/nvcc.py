#!/usr/bin/env python3
"""Stands for nvcc and the C++ compiler: what they would read has to exist, what they would write is made, empty."""

import sys
from pathlib import Path


def included(arguments):
    """The folders of -I and -isystem."""
    for before, each in zip(["", *arguments], arguments, strict=False):
        if before in ("-I", "-isystem"):
            yield each
        elif each.startswith("-I") and each != "-I":
            yield each[2:]


def main(arguments):
    if "--version" in arguments:
        print("Cuda compilation tools, release 13.0, V13.0.88")
        return
    read = [each for each in arguments if each.endswith((".cu", ".cc", ".cpp", ".o"))]
    written = arguments[arguments.index("-o") + 1]
    read += [folder for folder in included(arguments) if "flashinfer" in folder]
    missing = [each for each in read if each != written and not Path(each).exists()]
    if missing:
        sys.exit(f"no such file: {missing}")
    for flag in ("-o", "-MF", "--dependency-output"):
        if flag in arguments:
            Path(arguments[arguments.index(flag) + 1]).write_text("")


if __name__ == "__main__":
    main(sys.argv[1:])
