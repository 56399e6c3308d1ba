import sys

from tests.integrations.open_clip.open_clip_4 import installed
from vl_plugins.integrations.open_clip.launcher import main

with installed():
    sys.exit(main(sys.argv[1:]))
