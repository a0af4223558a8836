"""Before anything imports torch: threads that wait soon sleep, as on the command line; Ctrl-C is heard."""

import os
import signal

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
