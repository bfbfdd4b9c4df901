"""Write what pyproject.toml declares into docs/understand/guarantees.md: why, how large, under which licence.

python docs/dependencies.py            write it; licences and sizes are those of what is installed here
python docs/dependencies.py --audit    look for known vulnerabilities with pip-audit, if it is here and finds its data
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from generate import with_part

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "understand" / "guarantees.md"
NOTICE = "<!-- Written by docs/dependencies.py from pyproject.toml and what is installed. Run `make audit`. -->"

WHY = {
    "duckdb": "the table engine: SQL over Parquet, in place",
    "rich": "tables that fit a terminal",
    "tomli": "reads devices.toml where Python has no tomllib",
    "torch": "what is profiled",
    "numpy": "columns of spans as arrays: correlation, storing, OTLP requests",
    "cupti-python": "device work through CUPTI",
    "nvidia-ml-py": "power, clocks and memory of a GPU",
    "torchvision": "models by name",
    "timm": "models by name",
    "transformers": "models by name",
    "opentelemetry-sdk": "spans in services; context of a request",
    "opentelemetry-exporter-otlp": "OTLP over HTTP and gRPC",
    "protobuf": "OTLP's messages",
    "opentelemetry-propagator-jaeger": "services that still send uber-trace-id",
    "mcp": "answers for MCP clients, over stdio",
    "jsonschema": "validates JSON answers by their schema, in the tests",
    "scipy": "the generic model of xsp predict fit",
    "scikit-learn": "a random forest, a baseline of xsp predict fit",
    "onnx": "graphs of ONNX files: the format, and the shapes in it",
    "onnxruntime": "runs ONNX files in evaluations, and times their nodes",
    "pandas": "traces as data frames",
    "polars": "traces as data frames",
    "pyarrow": "traces as Arrow tables",
    "matplotlib": "charts in notebooks",
    "nbformat": "notebooks in the tests",
    "nbclient": "runs notebooks in the tests",
    "ipykernel": "runs notebooks",
    "pydantic": "manifests: fields, their schema",
    "packaging": "versions and their ranges in manifests",
    "pillow": "images of data sets: decoding and resizing",
    "fastapi": "the pages of xsp evaluate, and a service to test with",
    "httpx": "a client of that service",
    "accelerate": "Hugging Face's Trainer, in the tests of ordinary programs",
    "hypothesis": "tests on random input",
    "jaeger-client": "tested against; archived",
    "mypy": "types",
    "opentelemetry-instrumentation-fastapi": "a traced service to test with",
    "pytest": "tests",
    "pytest-timeout": "a test that hangs fails by its name",
    "pytest-xdist": "tests in several processes",
    "pytorch-lightning": "Lightning, in the tests of ordinary programs",
    "pyyaml": "manifests are YAML",
    "safetensors": "writes a state dict for the store of weights; xsp share is compared with it",
    "ruff": "style",
    "selenium": "the report in a real browser",
    "six": "undeclared dependency of jaeger-client",
    "uvicorn": "serves those pages, and the service to test with",
    "mlcommons-loadgen": "MLPerf's load generator, compared with ours",
    "ray": "agents on several machines",
    "pyspark": "the same analyses on a cluster",
    "sqlglot": "writes DuckDB's SQL as Spark's",
}
"""Why each one is there. A package that is declared and not here stops the script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page or audit, and return the exit code."""
    made = argparse.ArgumentParser(description="Write the dependencies into docs/understand/guarantees.md.")
    made.add_argument("--audit", action="store_true", help="look for known vulnerabilities instead")
    if made.parse_args(argv).audit:
        return audit()
    PAGE.write_text(written(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: written")
    return 0


def declared() -> Iterator[tuple[str, str, str]]:
    """Yield extra, name and range of each declared dependency; xsp's own extras are not repeated."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, requirements in {"core": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            name, wanted = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(.*)", requirement).groups()
            if name != "xsp":
                yield extra, name, wanted


def written() -> str:
    """Return the page with its part on dependencies."""
    missing = {name for _, name, _ in declared()} - WHY.keys()
    if missing:
        raise SystemExit(f"say in WHY what they are for: {', '.join(sorted(missing))}")
    lines = ["| extra | package | range | installed | MB | licence | why |", "|---|---|---|---|---:|---|---|"]
    for extra, name, wanted in declared():
        if extra == "dev":
            continue  # of the tests alone: pyproject.toml lists them
        version, size, licence = _installed(name)
        lines.append(f"| {extra} | `{name}` | {wanted} | {version} | {size} | {licence} | {WHY[name]} |")
    vendored = (
        "Apache ECharts (Apache-2.0, BSD-3-Clause in parts) is in the report: `xsp/report/assets/` has its licence."
    )
    part = "\n\n".join(["\n".join(lines), vendored])
    return with_part(PAGE.read_text(encoding="utf-8"), "dependencies", part, NOTICE)


def _installed(name: str) -> tuple[str, str, str]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return "not here", "", "not looked up"
    files = [Path(str(file.locate())) for file in found.files or ()]
    size = sum(file.stat().st_size for file in files if file.is_file()) / 1e6
    return found.version, f"{size:.1f}", _licence(found)


def _licence(found: metadata.Distribution) -> str:
    """Return the licence as the package states it: its expression, its classifiers, or the start of its text."""
    about = found.metadata
    if expression := about.get("License-Expression"):
        return expression
    named = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or () if text.startswith("License ::")]
    stated = " ".join((about.get("License") or "").split())
    return ", ".join(named) or stated[:40] or "not stated"


def audit() -> int:
    """Look for known vulnerabilities of what is installed, say what could not be looked up; return the exit code."""
    if importlib.util.find_spec("pip_audit") is None:
        print("not audited: pip-audit is not installed here (pip install pip-audit)")
        return 0
    command = [sys.executable, "-m", "pip_audit", "--local", "--format", "json", "--progress-spinner", "off"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    try:
        packages = json.loads(ended.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"not audited: {(ended.stderr.strip().splitlines() or ['pip-audit said nothing'])[-1]}")
        return 0
    return said(packages)


def said(packages: Sequence[dict[str, Any]]) -> int:
    """Print what pip-audit found out of each package, and return 1 if there is anything known against one."""
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    known = [(each, flaw) for each in packages for flaw in each.get("vulns", ())]
    for each, flaw in known:
        print(
            f"{each['name']} {each['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'none yet'}"
        )
    print(f"{len(packages) - len(unknown)} of {len(packages)} packages audited, {len(known)} vulnerabilities known")
    if unknown:
        print(f"not audited, because the index here has no data of them: {', '.join(unknown)}")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
