"""Worker processes that end with the process that started them, even if that was killed."""

import multiprocessing
import os
import threading


def end_with_parent():
    """To be called by a worker at its start: a thread waits for the parent's end, and nothing else of it is left."""
    parent = multiprocessing.parent_process()

    def wait():
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
