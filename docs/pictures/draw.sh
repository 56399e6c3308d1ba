#!/bin/sh
# Renews the pictures in this folder: trains as the demo does and measures the losses, which takes about ten minutes.
# `make pictures` runs it.
set -eu
cd "$(dirname "$0")/../.."
work=build/pictures runs=build/pictures/logs out=docs/pictures
rm -rf $work
vl-plugins demo --out $work
cp $work/report.html $out
vl-plugins plot training clip=$runs/clip unified=$runs/unified sets=$runs/sets --out $out/demo.svg
vl-plugins plot training $runs/unified --out $out/training.svg
vl-plugins plot attention --checkpoint $runs/sets --shards $work/shards/toy-test-000000.tar --out $out/attention.svg
vl-plugins plot gradients unified scale=10 triplet_hn --out $out/gradients.svg
python -m benchmarks.losses --losses unified triplet_hn goal --backends dense tiled \
    --peers clip clip-compiled siglip triplet-margin three-products \
    --batch-sizes 64 256 1024 4096 --rounds 3 --threads 1 --plot $out/losses_cpu.png
