"""The first process of a launched group: it outlives nobody.

    python -m assets.guard PARENT GRACE_SECONDS COMMAND …

It leads the session and process group that `assets.launch` made, starts COMMAND in it and passes its exit code on
(128 + n for signal n). When PARENT, the process that launched it, is gone, even by SIGKILL, the whole group gets
SIGTERM and after the grace time SIGKILL, so that no rank is left holding a device. A poll of `getppid` is used and not
`PR_SET_PDEATHSIG`: that signal reaches one process, is bound to the thread that forked, and needs code between fork and
exec of a threaded process. Costs one idle interpreter (about 10 MB) that wakes twice a second; standard library only.
"""

import os
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.5


def guard(parent: int, grace_s: float, command: list[str]) -> int:
    """Run `command` and return its exit code, or end the whole group when `parent` is gone."""
    # a handler, not SIG_IGN: the guard outlasts the group's SIGTERM, its children start with the default action
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command)
    while True:
        try:
            code = child.wait(POLL_SECONDS)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                _end_group(child, grace_s)


def _end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    os.killpg(0, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while child.poll() is None and time.monotonic() < end:
        time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)  # this process, too


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
