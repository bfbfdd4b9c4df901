"""Endpoints that spans are sent to, from options and from OpenTelemetry's environment variables.

An option overrides the variable for traces (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`), which overrides the variable for
all signals (`OTEL_EXPORTER_OTLP_ENDPOINT`). An empty variable counts as unset. An invalid value is an error that names
it, whereas OpenTelemetry's SDKs warn and continue: spans must not be sent to an unintended place.

Only the standard library is imported here, because a measured program checks its endpoint before it starts.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from xsp import hosts, semconv
from xsp.errors import PluginError, UsageError

FROM_ENVIRONMENT = "env"
"""The target for the endpoint in the environment variables, or else OpenTelemetry's default."""

VARIABLE = "XSP_OTLP"
"""Environment variable with the meaning of `--otlp`; unlike an option, it is not visible in process lists."""

TRACES_PATH = "v1/traces"
_DEFAULT = {"grpc": "http://localhost:4317", "http": "http://localhost:4318"}
_REQUIRED_MODULES = ("grpc", "numpy", "opentelemetry.proto", "requests")


class OtlpProtocol(str, enum.Enum):
    """Transports of requests; the values are those of `OTEL_EXPORTER_OTLP_PROTOCOL`, except for files."""

    GRPC = "grpc"
    HTTP = "http/protobuf"
    HTTP_JSON = "http/json"
    JSON_LINES = "file of JSON lines"
    PROTOBUF_FILE = "file of protobuf messages"

    def __str__(self) -> str:
        return self.value


_FILES = {".jsonl": OtlpProtocol.JSON_LINES, ".json": OtlpProtocol.JSON_LINES, ".pb": OtlpProtocol.PROTOBUF_FILE}
PROTOCOLS = (OtlpProtocol.GRPC.value, OtlpProtocol.HTTP.value, OtlpProtocol.HTTP_JSON.value)
COMPRESSIONS = ("gzip", "none")


@dataclass(frozen=True)
class ExportOptions:
    """The user's options; for None, the environment decides."""

    protocol: str | None = None
    headers: tuple[str, ...] = ()
    """Each `name=value`; they replace the headers in the environment."""

    timeout_s: float | None = None
    compression: str | None = None
    insecure: bool | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    service: str | None = None


@dataclass(frozen=True)
class OtlpEndpoint:
    """A receiver of OTLP, or a file, with all settings for sending to it."""

    url: str = field(repr=False)
    """URL with credentials and query, never shown; for gRPC a target, for a file its path."""

    name: str
    """URL without credentials and query, for messages and as the key in `delivery.json`."""

    protocol: OtlpProtocol
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    timeout_s: float = 10.0
    gzip: bool = False
    insecure: bool = False
    """Whether to connect without TLS; only used for gRPC, whose target has no scheme."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    service: str = semconv.SERVICE

    @property
    def is_file(self) -> bool:
        """Whether requests go into a file."""
        return self.protocol in _FILES.values()

    @property
    def address(self) -> SplitResult:
        """The parts of the URL; a gRPC target without a scheme counts as an authority."""
        return urlsplit(self.url if "://" in self.url else f"//{self.url}")

    @property
    def is_this_machine(self) -> bool:
        """Whether the address is a loopback address, at which only processes of this machine can listen."""
        host = self.address.hostname or ""
        return host.endswith(".localhost") or hosts.is_loopback(host)

    def connection_refused_message(self) -> str:
        """Return the message for an address of this machine at which nothing listens."""
        return (
            f"{self.name}: nothing listens there (connection refused): start a receiver, such as `xsp serve`, or give "
            "its address with --to URL"
        )

    def without_secrets(self, text: str) -> str:
        """Return the message of a receiver or a library, on one line, without secrets."""
        parts = urlsplit(self.url) if "://" in self.url else SplitResult("", "", "", "", "")
        secrets = [value for _, value in self.headers] + [parts.username or "", parts.password or "", parts.query]
        for secret in sorted(secrets, key=len, reverse=True):
            if len(secret) > 3:  # shorter ones occur in many words
                text = text.replace(secret, "***")
        printable = "".join(letter if letter.isprintable() else " " for letter in text)
        return " ".join(printable.split())[:300]


def endpoint(
    target: str, options: ExportOptions | None = None, environment: Mapping[str, str] = os.environ
) -> OtlpEndpoint:
    """Return the endpoint of a target.

    Args:
        target: `http://…` or `https://…`, a base to which `/v1/traces` is appended as OTLP specifies; `grpc://…`, or
            with TLS `grpcs://…`; a file name that ends in `.jsonl`, `.json` or `.pb`; or `env`.
        options: the user's other options.
        environment: the environment, with the standard variables `OTEL_EXPORTER_OTLP_*` and `OTEL_SERVICE_NAME`.

    Raises:
        UsageError: a target, an option or a variable is invalid.
        PluginError: a package is missing; the message says what to install.
    """
    check_installed()
    options, variables = options or ExportOptions(), _Variables(environment)
    service = options.service or environment.get("OTEL_SERVICE_NAME") or semconv.SERVICE
    file = _FILES.get(Path(target).suffix.lower()) if "://" not in target else None
    if file is not None:
        return OtlpEndpoint(target, Path(target).name, file, service=service)
    protocol = _protocol(target, options, variables)
    url, name, insecure = _resolve_address(target, protocol, options, variables)
    cert_file = _file(options.cert_file, "--cert", "CLIENT_CERTIFICATE", variables)
    key_file = _file(options.key_file, "--key", "CLIENT_KEY", variables)
    if key_file and not cert_file:
        variable = "--key" if options.key_file else variables.find("CLIENT_KEY")[0]
        raise UsageError(f"{variable}: a client's key needs its certificate: give --cert FILE too")
    return OtlpEndpoint(
        url=url,
        name=name,
        protocol=protocol,
        headers=_headers(options, variables),
        timeout_s=_timeout(options, variables),
        gzip=variables.choice("COMPRESSION", options.compression, COMPRESSIONS, "none") == "gzip",
        insecure=insecure,
        ca_file=_file(options.ca_file, "--ca-file", "CERTIFICATE", variables),
        cert_file=cert_file,
        key_file=key_file,
        service=service,
    )


def check_installed() -> None:
    """Check that the packages needed for sending are installed, without importing them.

    Raises:
        PluginError: a package is missing; the message says what to install.
    """
    missing = [
        name for name in _REQUIRED_MODULES if find_spec(name.partition(".")[0]) is None or find_spec(name) is None
    ]
    if missing:
        raise PluginError(f'sending spans needs {", ".join(missing)}: pip install "xsp[otel]"')


class _Variables:
    """The variables `OTEL_EXPORTER_OTLP_*`; variables for traces override those for all signals."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def find(self, name: str) -> tuple[str, str]:
        """Return the name and the value of the variable that is set; both empty if none is."""
        for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
            value = self._environment.get(variable, "").strip()
            if value:
                return variable, value
        return "", ""

    def choice(self, name: str, option: str | None, choices: Iterable[str], default: str) -> str:
        """Return the option, else the variable, else the default; raise UsageError if it is not among the choices."""
        variable, value = ("", option) if option else self.find(name)
        if value and value not in choices:
            raise UsageError(f"{variable or f'--{name.lower()}'} {value!r}: choose one of {', '.join(choices)}")
        return value or default


def _protocol(target: str, options: ExportOptions, variables: _Variables) -> OtlpProtocol:
    """Return the protocol: that of the target's scheme, else the one of the options or of the environment."""
    if target.startswith(("grpc://", "grpcs://")):
        if options.protocol not in (None, OtlpProtocol.GRPC.value):
            raise UsageError(f"--protocol {options.protocol}: cannot be used with a target that begins with grpc://")
        return OtlpProtocol.GRPC
    return OtlpProtocol(variables.choice("PROTOCOL", options.protocol, PROTOCOLS, OtlpProtocol.HTTP.value))


def _resolve_address(
    target: str, protocol: OtlpProtocol, options: ExportOptions, variables: _Variables
) -> tuple[str, str, bool]:
    """Return the URL or gRPC target, the name to show, and whether the connection is without TLS."""
    source, is_base = "", True
    if target == FROM_ENVIRONMENT:
        source, target = variables.find("ENDPOINT")
        is_base = source != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
        target = target or _DEFAULT["grpc" if protocol is OtlpProtocol.GRPC else "http"]
    if protocol is OtlpProtocol.GRPC:
        return _grpc(target, _is_insecure(options, variables))
    parts = _split(target, source)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        label = f"{source} {_without_credentials(parts)}".strip()
        raise UsageError(
            f"{label}: not an endpoint; write http://localhost:4318, grpc://localhost:4317, "
            "or a file that ends in .jsonl or .pb"
        )
    has_path = not source and parts.path.rstrip("/").endswith(f"/{TRACES_PATH}")
    path = f"{parts.path.rstrip('/')}/{TRACES_PATH}" if is_base and not has_path else parts.path or "/"
    parts = parts._replace(path=path, fragment="")
    return urlunsplit(parts), _without_credentials(parts), parts.scheme == "http"


def _is_insecure(options: ExportOptions, variables: _Variables) -> bool:
    """Return whether gRPC goes without TLS."""
    if options.insecure is not None:
        return options.insecure
    variable, value = variables.find("INSECURE")
    if value.lower() not in ("", "true", "false"):
        raise UsageError(f"{variable} {value!r}: choose true or false")
    return value.lower() == "true"


def _grpc(target: str, insecure: bool) -> tuple[str, str, bool]:
    """Return the same for gRPC. HTTP schemes decide on TLS; other schemes (`dns:///`, `unix:`) are passed to gRPC."""
    parts = _split(target, "")
    if parts.scheme not in ("grpc", "grpcs", "http", "https"):
        return target, target, insecure
    if not parts.hostname:
        raise UsageError(f"{_without_credentials(parts)}: not an endpoint; write grpc://localhost:4317")
    if "@" in parts.netloc:
        raise UsageError(
            f"{_without_credentials(parts)}: a gRPC URL has no user and password; give a header, authorization=…"
        )
    netloc = parts.netloc
    plaintext = parts.scheme in ("grpc", "http")
    return netloc, f"grpc{'' if plaintext else 's'}://{netloc}", plaintext


def _split(url: str, source: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises if it is not a number
    except ValueError as error:
        raise UsageError(f"{source or 'the endpoint'}: not a URL ({error}); write http://localhost:4318") from error
    return parts


def _without_credentials(parts: SplitResult) -> str:
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _headers(options: ExportOptions, variables: _Variables) -> tuple[tuple[str, str], ...]:
    """Return the headers; in the environment they are comma-separated and percent-encoded as in W3C baggage."""
    if options.headers:
        return tuple(_header(text, "--header") for text in options.headers)
    variable, value = variables.find("HEADERS")
    pairs = [_header(text, variable) for text in value.split(",") if text.strip()]
    return tuple((unquote(name), unquote(text)) for name, text in pairs)


def _header(text: str, source: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name or not all(part.isprintable() for part in (name, value)):
        raise UsageError(f"{source}: this is not a header; write name=value")  # without the text: it may be a secret
    return name.lower(), value


def _timeout(options: ExportOptions, variables: _Variables) -> float:
    """Return the timeout in seconds; the environment has milliseconds."""
    variable, value = variables.find("TIMEOUT")
    if options.timeout_s is None and not value:
        return OtlpEndpoint.timeout_s
    try:
        seconds = options.timeout_s if options.timeout_s is not None else float(value) / 1000
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        source = f"{variable} {value!r}: write milliseconds" if options.timeout_s is None else "--timeout: give seconds"
        raise UsageError(f"{source} above 0")
    return seconds


def _file(option: str | None, name: str, variable: str, variables: _Variables) -> str | None:
    source, value = (name, option) if option else variables.find(variable)
    if value and not os.access(value, os.R_OK):
        raise UsageError(f"{source} {value}: cannot be read; name a readable PEM file")
    return value or None
