"""Which host names are loopback, and that every server asks the one function that knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from xsp import hosts

LOOPBACK = ["127.0.0.1", "127.0.0.1:4318", "127.0.0.2", "localhost:1", "LOCALHOST", "localhost:", "[::1]", "[::1]:4318",
            "[::ffff:127.0.0.1]:80", "[0:0:0:0:0:0:0:1]", None]  # fmt: skip
OTHERS = [
    "", ":80", " localhost", "localhost ", "localhost\t", "evil.example", "evil.example:4318", "127.0.0.1.evil.example",
    "localhost.evil.example", "localhost.", "127.0.0.1.", "evil.localhost",
    "[::1].evil.example", "[::1]evil.example:80", "[::1", "::1", "[::1]]", "[[::1]]", "[127.0.0.1]", "[localhost]",
    "[::1%evil.example]", "[::1%25lo]", "[::2]:4318", "[::]", "[::ffff:192.0.2.1]",
    "localhost@evil.example", "localhost:8611@evil.example", "user@localhost", "127.0.0.1:evil.example",
    "127.0.0.1:80:80", "localhost:99999", "localhost:+1", "localhost:-1", "localhost:8 0", "localhost:٨٠",
    "localhost/evil", "localhost?", "localhost#", "localhost\\@evil.example", "http://localhost", "localhost,evil",
    "127.1", "0127.0.0.1", "0x7f.0.0.1", "2130706433", "127.0.0.01", "127.0.0.1%00", "127.0.0.1\0", "localhost\0",
    "１２７.0.0.1", "ⅼocalhost", "locaLhoſt", "127。0。0。1", "0.0.0.0", "10.0.0.1",
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_is_accepted_in_each_form(host: str | None) -> None:
    assert hosts.names_loopback(host)


@pytest.mark.parametrize("host", OTHERS, ids=ascii)
def test_what_only_looks_like_loopback_is_refused(host: str) -> None:
    assert not hosts.names_loopback(host)


@pytest.mark.parametrize("host", OTHERS, ids=ascii)
def test_every_server_refuses_them(host: str) -> None:
    pytest.importorskip("pydantic")
    from xsp.evaluate.web.guard import is_this_server
    from xsp.report.serve import _response

    assert not is_this_server(host, "127.0.0.1")
    assert _response({"run": b"page"}, "/run", host)[0] == 403
    assert host in ("10.0.0.1", "0.0.0.0", "[::2]:4318", "[::]", "[::ffff:192.0.2.1]") or not is_this_server(
        host, "0.0.0.0"
    )  # a server for others is also named by an address, which no foreign page can choose


def test_no_module_judges_loopback_by_itself() -> None:
    root = Path(hosts.__file__).parent
    judges = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"""(?<!hosts)\.is_loopback\b|["']localhost["'],? (in|==)|(==|in) [({]?["']localhost["']""",
                     path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert judges == {"hosts.py"}
