# SPDX-License-Identifier: Apache-2.0
"""Communication between the processes of one host: anonymous shared memory for payload, Unix sockets for bad news.

Uses nothing of MindSpore's communication. `rendezvous` finds the peers (`address`: where nobody else can listen or call),
`segment` lays out each rank's memory (`arena`: the large results in it), `futex` sleeps on its words, `signals` is where
ranks meet and notice each other's end (`deadlock`: that they wait in a circle), `engine` builds the collectives on arrays
(`async_op`: on a thread), `backend` adapts them to tensors. The invariant: nothing outlives the processes, however they
end, but a socket file where a start was killed; it stands in nobody's way.
"""
