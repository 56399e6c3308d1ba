# Scripts: pytest would import them to look for doctests.
collect_ignore_glob = ["bench_*.py"]
