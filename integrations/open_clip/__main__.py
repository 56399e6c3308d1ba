import os
import sys

from vl_plugins.integrations.open_clip.launcher import main

if __name__ == "__main__":
    # open_clip's trainer loads checkpoints with torch's default, which before torch 2.6 ran their code.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    sys.exit(main(sys.argv[1:]))
