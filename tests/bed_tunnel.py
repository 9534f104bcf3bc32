"""What `ssh -L` does, for a bed: a port of this host's loopback that leads to a port of a machine's loopback."""

import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
BLOCK = 1 << 16


@contextlib.contextmanager
def tunnel(pid: int, port: int) -> Iterator[int]:
    """A port here, while the body runs, that leads to 127.0.0.1:`port` in the network of process `pid` (root only)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, pid, port), daemon=True).start()
        yield listener.getsockname()[1]


def _serve(listener: socket.socket, pid: int, port: int) -> None:
    _enter_network(pid)  # of this thread only; the listener stays in its own
    while True:
        try:
            near, _ = listener.accept()
        except OSError:  # the tunnel has ended
            return
        try:
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            continue
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _enter_network(pid: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network of process {pid}")
    finally:
        os.close(namespace)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while block := source.recv(BLOCK):
            target.sendall(block)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
