# SPDX-License-Identifier: Apache-2.0
"""Makes sockets where it was started, and hands them over: `socket_maker.py FD`.

A socket belongs for ever to the namespace and the cgroup in which it was made, whoever uses it
then. So a test can hold a pod's socket in its hands. Imports nothing outside the standard library.

A request is `FAMILY TYPE PROTOCOL` in decimal; the answer is the descriptor with `ok`, or the
number of an error alone.
"""

import os
import socket
import sys


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        while request := channel.recv(64):
            family, kind, protocol = map(int, request.split())
            try:
                made = socket.socket(family, kind, protocol)
            except OSError as error:
                channel.send(str(error.errno).encode())
                continue
            with made:
                socket.send_fds(channel, [b"ok"], [made.fileno()])


if __name__ == "__main__":
    os.chdir("/")
    main()
