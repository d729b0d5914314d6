"""The versions of other packages that redcoast was tested with."""

from importlib import metadata

# The oldest and the newest. `nox -s versions` runs the tests with both.
TESTED = {
    "jax": ("0.10.2", "0.12.0.1"),
    "equinox": ("0.13.8", "0.13.8"),
    "optax": ("0.2.8", "0.2.8"),
    "orbax-checkpoint": ("0.12.8", "0.12.8"),
}


def own_version() -> str:
    """Returns the installed version of redcoast."""
    try:
        return metadata.version("redcoast")
    except metadata.PackageNotFoundError:  # used from its source, without an installation
        return "(not installed)"


def versions_tested(package: str) -> str:
    """Returns the tested versions of a package, such as `0.10.2 to 0.12.0.1`."""
    oldest, newest = TESTED[package]
    return oldest if oldest == newest else f"{oldest} to {newest}"
