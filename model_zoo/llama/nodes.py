# SPDX-License-Identifier: Apache-2.0
"""The machines of a run, and what of them is refused before msrun starts: numbers, the port, a network that is not there.

No import of MindSpore.
"""
from __future__ import annotations

import socket
from dataclasses import dataclass

from ms_dtensor.errors import ConfigError
from ms_dtensor.tools.ranks import free_port


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run, and which of them this is."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int | None = None
    """None: any that is free."""

    def check(self) -> None:
        """Refuses what cannot be, and a port that somebody has."""
        if not 0 <= self.rank < self.count:
            raise ConfigError("For 'launch.py', the node's number does not fit.",
                              f"NODE_RANK = {self.rank}, NNODES = {self.count}", "Nodes count from 0 to NNODES - 1.",
                              "NODE_RANK=0 on the machine that MASTER_ADDR names, 1 on the next")
        if self.count > 1 and self.port is None:
            raise ConfigError("For 'launch.py', MASTER_PORT is not given.", f"NNODES = {self.count}",
                              "All nodes meet at one port of the first.", "MASTER_PORT=29500, the same on each")
        if self.port is not None and not 1024 <= self.port < 65536:
            raise ConfigError("For 'launch.py', MASTER_PORT cannot be a port.", f"MASTER_PORT = {self.port}",
                              "Ports of users are 1024 to 65535.", "MASTER_PORT=29500")
        try:  # as msrun does; a datagram's socket sends nothing
            where = socket.getaddrinfo(self.address, self.port or 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(where[0], where[1]) as probe:
                probe.connect(where[4])
        except OSError as error:
            raise ConfigError(f"For 'launch.py', no network leads to {self.address[:80]}.",
                              f"MASTER_ADDR = {self.address[:80]}: {error.strerror}",
                              "msrun's scheduler listens there, on one machine too, and each rank is to reach it.",
                              ["the address of machine 0: MASTER_ADDR=10.0.0.1" if self.count > 1 else
                               "switch the loopback on: ip link set lo up",
                               "ip addr  says which networks there are"]) from None
        if self.port is not None and self.rank == 0:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("", self.port))
                except OSError as error:
                    raise ConfigError(f"For 'launch.py', port {self.port} is in use.", f"MASTER_PORT = {self.port}: "
                                      f"{error.strerror}", "msrun's scheduler listens there, alone.",
                                      [f"another, the same on each node: MASTER_PORT={free_port()}",
                                       f"ss -ltnp | grep :{self.port}  says who has it",
                                       "on one machine leave it out: a free one is taken"]) from None


ALONE = Nodes()
