#!/usr/bin/env bash
# Iterations of ExGRPO on all GPUs of one machine, without SLURM: rollout and score as one process a
# GPU, each doing its shard of the parts, and training on all of them together. What exists is
# skipped, so the same command goes on after a kill. It evaluates nothing: see exgrpo evaluate.
#
#   exgrpo init runs/mine --recipe recipes/qwen2.5-math-7b.toml --problems openr1.parquet
#   recipes/node.sh RUN STEPS [GPUS]
set -euo pipefail
(($# >= 2)) || { echo "usage: $0 RUN STEPS [GPUS]" >&2; exit 2; }
run=$1 steps=$2 gpus=${3:-$(nvidia-smi --list-gpus | wc -l)}
trap 'kill $(jobs -p) 2>/dev/null && wait || true' EXIT
trap 'exit 143' TERM

# A model that is a folder needs nothing from the Hugging Face hub.
model=$(sed -n '/^\[model\]/,/^\[/s/^path = "\(.*\)"$/\1/p' "$run/recipe.toml" 2>/dev/null || true)
if [[ -d $model ]]; then export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}; fi

waited() { "$@" & wait $!; } # where a signal can end the waiting

on_each_gpu() { # STAGE STEP
  local i pid pids=()
  for ((i = 0; i < gpus; i++)); do
    CUDA_VISIBLE_DEVICES=$i exgrpo "$1" "$run" --step "$2" --shard "$i/$gpus" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

for ((step = 0; step < steps; step++)); do
  [[ -d $run/policy/$(printf 'step-%05d' $((step + 1))) ]] && continue
  on_each_gpu rollout "$step"
  [[ -d $run/rollouts/$(printf 'step-%05d' "$step") ]] || break # every question is retired
  exgrpo verify "$run" --step "$step" & # on the CPUs, beside score
  verify=$!
  on_each_gpu score "$step"
  wait "$verify"
  waited exgrpo curate "$run" --step "$step"
  waited torchrun --standalone --nproc-per-node "$gpus" -m exgrpo_cli train "$run" --step "$step"
done
