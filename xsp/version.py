"""The version of the distribution, in the one place that the build and the runs read it from."""

__version__ = "0.1.0"
