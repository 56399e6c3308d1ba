collect_ignore_glob = ["*.py"]  # scripts for tests/compare_versions.py
