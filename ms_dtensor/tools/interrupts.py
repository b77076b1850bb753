# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in the first moments of a command: an interruption that Python drops comes again.

Python raises KeyboardInterrupt wherever the main thread is. Is that in what runs at an object's end, as one function does
after each import, it prints "Exception ignored in ..." and goes on: a benchmark then ran for minutes.
Imported before all else, so it imports nothing that takes time.
"""
import _thread
import signal
import sys
import time


def come_again() -> None:
    """From here on, in this process: what is dropped is sent once more, when what dropped it is over."""
    main, told = _thread.get_ident(), sys.unraisablehook

    def again() -> None:
        time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    def hook(dropped) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(again, ())
        else:
            told(dropped)
    sys.unraisablehook = hook
