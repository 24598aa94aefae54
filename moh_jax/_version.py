"""The package version, read by pyproject.toml without importing JAX."""

__version__ = "0.1.0"
