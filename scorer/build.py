"""Which build this is."""

from importlib.metadata import PackageNotFoundError, version


def build_version() -> str:
    """The installed version."""
    try:
        return version("prefixrank")
    except PackageNotFoundError:
        return "not installed"
