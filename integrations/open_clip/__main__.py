import sys

from vl_plugins.integrations.open_clip.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
