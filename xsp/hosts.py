"""Which host a request or an address names, and whether it is this machine alone."""

from __future__ import annotations

import ipaddress
import re

_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{0,5}))?", re.ASCII)


def host_of(authority: str) -> str | None:
    """Return the host in a `Host` header in lower case, without port and brackets; None if it is not well-formed.

    The whole value is parsed: no part of `[::1].example` or `localhost:1@example` is a host.
    """
    match = _AUTHORITY.fullmatch(authority)
    if match is None or int(match[3] or 0) > 0xFFFF:
        return None
    if match[1] is not None:
        address = ip_address(match[1])
        return match[1].lower() if isinstance(address, ipaddress.IPv6Address) else None
    return match[2].lower()


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host is; None if it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address, or the name of one, so that only this machine can reach it."""
    address = ip_address(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return host.lower() == "localhost" if address is None else address.is_loopback


def names_loopback(authority: str | None) -> bool:
    """Return whether the `Host` header of a request names loopback; also if there is none, as from HTTP/1.0 clients.

    A foreign page can resolve its own name to loopback (DNS rebinding); then a browser would let it read the answers of
    a server there as its own. The name in the request reveals this.
    """
    if authority is None:
        return True
    host = host_of(authority)
    return host is not None and is_loopback(host)
