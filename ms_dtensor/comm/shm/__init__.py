# SPDX-License-Identifier: Apache-2.0
"""Communication between the processes of one host: anonymous shared memory for payload, Unix sockets for signals.

Uses nothing of MindSpore's communication. `rendezvous` finds the peers, `segment` lays out each rank's memory,
`signals` waits and notices dead peers, `engine` builds the collectives on arrays, `backend` adapts them to tensors.
The invariant: nothing outlives the processes, however they end; there is no file and no named object to clean up.
"""
