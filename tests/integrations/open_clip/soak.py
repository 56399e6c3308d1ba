"""The launcher, with a look at the process after each step: ``python -m tests.integrations.open_clip.soak FLAGS``."""

import json
import os
import sys
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from vl_plugins.integrations.open_clip.launcher import main

MEASURED = "measured-{rank}.jsonl"


def look():
    """Return the memory (bytes), open files and child processes of this process and of those below it."""
    own = os.getpid()
    children = [
        int(pid) for task in Path(f"/proc/{own}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return {
        "memory": resident(own),
        "files": len(os.listdir(f"/proc/{own}/fd")),
        "children": sorted(children),
        "memory of children": sum(resident(pid) for pid in children),
        "files of children": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in children),
    }


def resident(pid):
    """Return the memory without files: how much of torch's libraries is in memory depends on the machine."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


if __name__ == "__main__":
    with open(MEASURED.format(rank=os.environ["RANK"]), "w") as measured:

        def after_step(*_):
            measured.write(json.dumps(look()) + "\n")
            measured.flush()

        register_optimizer_step_post_hook(after_step)
        sys.exit(main(sys.argv[1:]))
