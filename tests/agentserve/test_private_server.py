"""The port of a server of one's own, and what its client makes of a server that ends while it answers."""

from __future__ import annotations

import socket
import threading

import pytest

from agentserve.cli.connect import Target, Unreachable
from agentserve.cli.private_server import ReservedPort
from agentserve.listen import listen


def test_a_reserved_port_is_for_who_is_told_of_it_and_for_nobody_else() -> None:
    reserved = ReservedPort()
    for _ in range(2):  # it may be killed and started again
        (server,) = listen("127.0.0.1", reserved.number)
        server.listen()
        socket.create_connection(("127.0.0.1", reserved.number)).close()
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", reserved.number))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", reserved.number))


def test_a_port_is_free_again_when_nobody_holds_it() -> None:
    number = ReservedPort().number
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))


@pytest.mark.parametrize(("head", "told"), [("200 OK", "does not answer as a server does"), ("503 No", "answered 503")])
def test_an_answer_that_breaks_off_is_told_as_such(head: str, told: str) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        target = Target(f"http://127.0.0.1:{server.getsockname()[1]}", None)

        def answer() -> None:
            for _ in range(2):
                client, _ = server.accept()
                with client:
                    client.recv(65536)
                    client.sendall(f"HTTP/1.1 {head}\r\nContent-Length: 100\r\n\r\n{{".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert target.readiness()["status"] == "unreachable"
        with pytest.raises(Unreachable, match=told):
            target.get("/v1/models")
        thread.join()
