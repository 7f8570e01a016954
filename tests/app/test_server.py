"""Where the app listens, whom it lets in, and what its process says and leaves behind."""

from __future__ import annotations

import socket

import pytest

from app import server
from fisedit.errors import InputError

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_others_need_a_token(host):
    with pytest.raises(InputError, match="give --token"):
        server.listen(host, 0)


@pytest.mark.parametrize("token", ["short", "0123456789abcde", "0123456789abcdef;", "0123456789 abcdef", "é" * 16])
def test_tokens_that_are_none(token):
    with pytest.raises(InputError, match="16 letters"):
        server.listen(token=token, port=0)


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 cannot be had .*in use.* give another --port"):
            server.listen(port=port)


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "a" * 300, "\0"])
def test_no_host(host):
    with pytest.raises(InputError, match="host must be"):
        server.listen(host, 0)


def test_names_that_are_let_in():
    here = server.listen("127.0.0.1", 0, allowed_hosts=["Studio.local"])
    everywhere = server.listen("0.0.0.0", 0, TOKEN)
    try:
        assert here.hosts == {"127.0.0.1", "localhost", "::1", "studio.local"} and not here.token
        assert socket.gethostname().lower() in everywhere.hosts and "*" not in everywhere.hosts
        assert here.url == f"http://127.0.0.1:{here.listener.getsockname()[1]}/"
        assert everywhere.url.endswith(f"/?token={TOKEN}")
    finally:
        here.listener.close()
        everywhere.listener.close()
