import sys

from vl_plugins.integrations.pytorch_metric_learning import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
