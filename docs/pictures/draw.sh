#!/bin/sh
# Renews the pictures in this folder: trains, as the demo does, and the trainer for pytorch-metric-learning.
# `make pictures` runs it; `--epochs 1` makes the demo shorter for a trial.
set -eu
cd "$(dirname "$0")/../.."
work=build/pictures runs=build/pictures/logs out=docs/pictures
rm -rf $work
vl-plugins demo --out $work "$@"
cp $work/report.html $out
vl-plugins plot training clip=$runs/clip unified=$runs/unified sets=$runs/sets --out $out/demo.svg
vl-plugins plot training $runs/unified --out $out/training.svg
vl-plugins plot gradients unified scale=10 triplet_hn --out $out/gradients.svg
python -m vl_plugins.integrations.pytorch_metric_learning --config toy.yaml --device cpu --out $work/towers \
    --train-data "$work/shards/toy-train-{000000..000002}.tar" --val-data $work/shards/toy-val-000000.tar \
    --loss smooth_chamfer --loss-kwargs base=unified \
    --set head.name=set head.num_slots=4 head.num_iters=4 head.hidden_dim=256
vl-plugins plot attention --checkpoint $work/towers --shards $work/shards/toy-test-000000.tar --out $out/attention.svg
