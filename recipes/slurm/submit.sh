#!/usr/bin/env bash
# Submit iterations of ExGRPO to SLURM: arrays for rollout, verify and score, single jobs for curate
# and train, each waiting for what it reads; so with loop.lag in the recipe steps are sampled while
# earlier ones are trained. A killed or failed array task can be sent again alone (or the whole
# script again): finished parts are skipped. `exgrpo status RUN` says which; docs/cluster.md tells
# more.
#
#   exgrpo init runs/mine --recipe recipes/qwen2.5-math-7b.toml --problems openr1.parquet
#   recipes/slurm/submit.sh runs/mine FIRST_STEP STEPS [TASKS]
#
# Options for sbatch (partition, account, time) come from the environment:
#   GPU_OPTIONS="--partition=gpu --gres=gpu:1" CPU_OPTIONS="--partition=cpu"
#   TRAIN_OPTIONS="--partition=gpu --nodes=2 --gres=gpu:8"     (default: GPU_OPTIONS)
# EVALUATE=10 evaluates every tenth policy, from the first, and the last, beside the steps; the run's
# evaluate.every becomes that too, so that the policies stay until they are evaluated.
# Logs lie in RUN/slurm.
set -euo pipefail
usage="usage: submit.sh RUN FIRST_STEP STEPS [TASKS]"
run=${1:?$usage} first=${2:?$usage} steps=${3:?$usage} tasks=${4:-8}
script=$(dirname "$0")/stage.sbatch every=${EVALUATE:-0}
lag=$(sed -n '/^\[loop\]/,/^\[./s/^lag *= *//p' "$run/recipe.toml" 2>/dev/null || true)
[[ -s $run/recipe.toml ]] || {
  echo "submit.sh: $run: no run (recipe.toml is missing); start it with: exgrpo init $run -r RECIPE" >&2
  exit 2
}
((every == 0)) || grep -qx "every = $every" "$run/recipe.toml" ||
  exgrpo init "$run" --set evaluate.every="$every" >/dev/null
mkdir -p "$run/slurm"
printf '%s\n' "GPU_OPTIONS=${GPU_OPTIONS:-}" "CPU_OPTIONS=${CPU_OPTIONS:-}" >"$run/slurm/options" # for status
read -ra gpu <<<"${GPU_OPTIONS:-}"
read -ra cpu <<<"${CPU_OPTIONS:-}"
read -ra trainer <<<"${TRAIN_OPTIONS:-${GPU_OPTIONS:-}}"

submit() { # STAGE STEP TASKS DEPENDENCIES OPTIONS... -> job id
  local stage=$1 step=$2 count=$3 after
  after=$(xargs <<<"${4//:/ }") && after=${after// /:} # without those that were not sent
  shift 4
  sbatch --parsable --job-name="$stage-$step" --kill-on-invalid-dep=yes \
    --output="$run/slurm/%x-%A${count:+_%a}.log" \
    ${after:+--dependency=afterok:$after} \
    ${count:+--array=0-$((count - 1))} "$@" "$script" "$stage" "$run" "$step" $count | cut -d';' -f1
}

evaluate() { # POLICY DEPENDENCIES, where it is due
  ((every > 0 && ($1 % every == 0 || $1 == first + steps))) || return 0
  echo "step $1: evaluate $(submit evaluate "$1" "" "$2" "${gpu[@]}")"
}

evaluate "$first" "" # skipped where it is there
curate="" train=([first]="") # job ids: curate of the step before, train by the policy it makes
for ((step = first; step < first + steps; step++)); do
  policy=$((step - ${lag:-0}))
  ((policy > first)) || policy=$first
  rollout=$(submit rollout "$step" "$tasks" "$curate:${train[policy]}" "${gpu[@]}")
  verify=$(submit verify "$step" "$tasks" "$rollout" "${cpu[@]}")
  score=$(submit score "$step" "$tasks" "$rollout" "${gpu[@]}")
  curate=$(submit curate "$step" "" "$verify:$score" "${cpu[@]}")
  next=$((step + 1))
  train[next]=$(submit train "$step" "" "$curate:${train[step]}" "${trainer[@]}")
  echo "step $step: rollout $rollout, verify $verify, score $score, curate $curate, train ${train[next]}"
  evaluate "$next" "${train[next]}"
done
