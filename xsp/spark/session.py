"""A session on the requested Spark cluster, or on a local one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO, Any

from xsp.errors import AnalysisError, PluginError, UsageError

MIN_JAVA = 17
"""The oldest Java version that runs Spark 4, according to the documentation of PySpark 4."""

LOCAL = "local[*]"
"""The master for plain `spark`: Spark in one process, on all cores of this machine."""

SETTINGS = {
    "spark.app.name": "xsp",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.mergeSchema": "true",  # for runs of different versions of xsp in one job
    "spark.sql.ansi.enabled": "true",  # an overflow is an error, as in DuckDB
}


_MASTERS = re.compile(r"spark|yarn|local(-cluster)?(\[.*\])?|(spark|k8s)://.+")


def master(engine: str) -> str:
    """Return the Spark master for the value of `--engine`: `spark`, or any master URL.

    Raises:
        UsageError: it is neither.
    """
    if not _MASTERS.fullmatch(engine):
        raise UsageError(f"--engine {engine}: write duckdb, spark, or a master: spark://HOST:7077, yarn, local[4]")
    return LOCAL if engine == "spark" else engine


def start(engine: str) -> Any:
    """Return a `SparkSession` on a cluster; an existing session of this process is reused, as usual in Spark.

    Raises:
        UsageError: `engine` is not the name of a cluster.
        PluginError: PySpark or a suitable Java is missing; the message says what to install.
        AnalysisError: the cluster cannot be reached.
    """
    cluster = master(engine)
    try:
        import sqlglot  # noqa: F401
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise PluginError(f"--engine {engine}: {error.name} is not installed; pip install 'xsp[spark]'") from error
    check_java(engine)
    settings = {**SETTINGS, "spark.master": cluster, **(_local_settings() if cluster.startswith("local") else {})}
    with tempfile.TemporaryFile() as log:
        try:
            _start_java(settings, log)
            builder = SparkSession.builder
            for name, value in settings.items():
                builder = builder.config(name, value)
            session = builder.getOrCreate()
        except Exception as error:  # errors of Java, which py4j raises as various classes
            reason = _last_line(log) if "JAVA_GATEWAY_EXITED" in str(error) else reason_of(error)
            raise AnalysisError(f"--engine {engine}: no session with this cluster ({reason})") from error
    session.sparkContext.setLogLevel("ERROR")
    return session


def _local_settings() -> dict[str, str]:
    """Return the settings of a cluster on this machine alone."""
    return {
        # No other machine has to reach the driver, so it only listens on the loopback interface.
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        # The default of Spark is 200 partitions of every table.
        "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
        # By default Spark creates an empty folder for tables in the current directory.
        "spark.sql.warehouse.dir": str(Path(tempfile.gettempdir()) / "xsp-spark"),
    }


def _start_java(settings: dict[str, str], log: IO[bytes]) -> None:
    """Start the JVM that drives Spark, unless this process has one; its log goes to a file, not to the terminal.

    Its errors are raised as exceptions, so the log would only repeat them, between the lines of a table.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is None:
        java = launch_gateway(SparkConf(loadDefaults=False).setAll(list(settings.items())), {"stderr": log})
        SparkContext._ensure_initialized(gateway=java)


def check_java(engine: str) -> None:
    """Check that there is a Java that runs Spark.

    Raises:
        PluginError: there is no Java, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    requirement = f"Spark 4 needs Java {MIN_JAVA} or later (install a JRE, or set JAVA_HOME)"
    if java is None or not Path(java).is_file():
        raise PluginError(f"--engine {engine}: there is no Java; {requirement}")
    try:
        output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"--engine {engine}: {java} does not run ({error}); {requirement}") from error
    version = re.search(r'version "(?:1\.)?(\d+)', output)
    if version is not None and int(version[1]) < MIN_JAVA:
        raise PluginError(f"--engine {engine}: this Java is of version {version[1]}; {requirement}")


def reason_of(error: Exception) -> str:
    """Return the message of Spark or Java in one line, without py4j's first line, which names an internal call."""
    lines = [line.strip(": ") for line in str(error).splitlines() if line.strip()]
    message = lines[1:] if lines and lines[0].startswith("An error occurred while calling") else lines
    return (message or [type(error).__name__])[0][:300]


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    return (log.read().decode(errors="replace").strip().splitlines() or ["Java ended without a word"])[-1]
