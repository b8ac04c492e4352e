"""Where the command line starts: the program `flashtune`, and `python -m flashtune`.

Ctrl-C ends it with exit code 130 from its first moment to its last. While modules are imported nothing has begun, so
the process just ends: an exception could be lost in an import, or be printed in the middle of one.
"""

from __future__ import annotations

try:
    import atexit
    import os
    import signal
    import sys
except KeyboardInterrupt:
    exec("")  # or Python would end by the signal: see group.py
    raise SystemExit(130) from None


def main() -> None:
    """Runs the command line with the arguments of the process."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is ignored, as behind nohup
    if ours:
        signal.signal(signal.SIGINT, _leave)
        # While Python takes its modules down it would let a signal kill the process, whose work is done by then.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    sys.unraisablehook = _again
    from flashtune.cli.main import main as commands
    from flashtune.codegen.gpu.cuda import own_process

    own_process()
    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        commands(prog_name="flashtune")
    except KeyboardInterrupt:  # while the end of the command was told
        _leave()
    finally:
        if ours:
            signal.signal(signal.SIGINT, _leave)


def _leave(*_: object) -> None:
    """Ends the process at once."""
    try:
        if sys.stderr is not None:  # it is None where the shell closed it
            os.write(sys.stderr.fileno(), b"Interrupted.\n")
    finally:
        os._exit(130)


def _again(found: sys.UnraisableHookArgs) -> None:
    """Interrupts anew, a moment later, where Python can't pass an interrupt on: in a destructor, for example."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        from threading import Timer, main_thread

        # To the main thread, which may wait for something by now; Windows can't do that.
        interrupt = getattr(signal, "pthread_kill", lambda _, number: signal.raise_signal(number))
        Timer(0.05, interrupt, [main_thread().ident, signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(found)


if __name__ == "__main__":
    main()
