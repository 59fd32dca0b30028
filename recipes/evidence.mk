# The experiments of docs/evidence.md: arms of a few settings, repeated over seeds. Two runs at a time,
# a core each; a run that was stopped goes on, one that is done is not made again.
#   make -f recipes/evidence.mk -j2 weak            (or rare, rarest, ablations, demo, few, few-weak, lm)
#   make -f recipes/evidence.mk -j2 few SEEDS="1 2 3" ARMS_few="grpo groups"

SEEDS_lm ?= 1
OUT ?= runs/evidence
EXGRPO ?= .venv/bin/exgrpo
export OMP_NUM_THREADS ?= 1

.PHONY: weak rare rarest ablations demo few few-weak lm
.SECONDARY:

# Whole groups again: the questions of the last steps come back with seven of their rollouts, successes
# and failures, and one fresh one; the ratio is clipped as PPO clips it.
WHOLE := --set curate.replay_ratio=0.75 --set curate.replayed=7 \
  --set curate.replay_samples=1 --set 'curate.store=k > 0 AND k < n' --set curate.bucket=0 \
  --set curate.choose=age --set 'curate.drop=age > 5' \
  --set 'curate.retire=fresh_k = fresh_n AND fresh_n >= 7' --set objective.shaping=clip
GROUPS := --set curate.questions=24 $(WHOLE)

grpo := --set curate.replay_ratio=0
grpo-4 := $(grpo) --set curate.questions=4 --steps 120 --set evaluate.every=40
grpo-16 := $(grpo) --set curate.questions=16
exgrpo :=
exgrpo-slow := --set train.learning_rate=1e-4
exgrpo-fast := --set train.learning_rate=3e-4
# The entropy bonus as strong as the published one (docs/training.md), a fourteenth of the default.
exgrpo-mild := --set objective.entropy_bonus=7e-5
grpo-slow := $(grpo) $(exgrpo-slow)
grpo-fast := $(grpo) $(exgrpo-fast)
grpo-mild := $(grpo) $(exgrpo-mild)
groups-mild := $(GROUPS) $(exgrpo-mild)
exgrpo-clip := --set objective.shaping=clip
groups := $(GROUPS)
groups-lm := --set curate.questions=32 --set train.minibatch_questions=32 --set curate.start_success=0 $(WHOLE)
groups-successes := $(GROUPS) --set 'curate.store=correct AND k < n'
groups-shaped := $(GROUPS) --set objective.shaping=ratio
groups-any-age := $(GROUPS) --set curate.drop=false --set curate.choose=luck

# The paper's choices, one at a time.
random-question := --set curate.bucket=0
random-choice := --set curate.choose=luck
highest-entropy := --set curate.choose=-mean_entropy
unshaped := --set objective.shaping=none
uncorrected := --set objective.shaping=uncorrected
delayed := --set curate.start_success=0.35
never-retired := --set curate.retire=false
quarter := --set curate.replay_ratio=0.25
three-quarters := --set curate.replay_ratio=0.75

ARMS_weak ?= grpo grpo-4 grpo-16 grpo-slow grpo-fast exgrpo exgrpo-slow exgrpo-fast exgrpo-clip groups groups-successes groups-shaped groups-any-age grpo-mild exgrpo-mild groups-mild
ARMS_rare ?= grpo exgrpo groups
ARMS_rarest ?= grpo exgrpo groups
ARMS_ablations ?= exgrpo random-question random-choice highest-entropy unshaped uncorrected delayed never-retired quarter three-quarters
ARMS_demo ?= grpo exgrpo
ARMS_few ?= grpo exgrpo groups random-choice highest-entropy
ARMS_few-weak ?= grpo exgrpo groups
ARMS_lm ?= grpo exgrpo groups-lm

# What the arms of an experiment have in common.
recipe_weak := --recipe recipes/weak.toml
recipe_rare := $(recipe_weak) --set problems.path=build/weak/long.jsonl
recipe_rarest := $(recipe_weak) --set problems.path=build/weak/longest.jsonl --set objective.entropy_bonus=0
recipe_ablations := $(recipe_weak)
recipe_demo := --recipe recipes/demo.toml --set problems.limit=500 --set evaluate.every=16 --steps 32
recipe_few := --recipe recipes/demo.toml --set problems.limit=64 --set curate.questions=8 --steps 60 \
  --set train.learning_rate=2e-4 --set train.minibatch_questions=64 --set evaluate.every=20
recipe_few-weak := $(recipe_weak) --set problems.limit=64
recipe_lm := --recipe recipes/demo-lm.toml

needs_weak := build/weak-model build/weak
needs_rare := $(needs_weak) build/weak/long.jsonl
needs_rarest := $(needs_weak) build/weak/longest.jsonl
needs_ablations := $(needs_weak)
needs_demo := build/demo-model
needs_few := build/demo-model
needs_few-weak := $(needs_weak)
needs_lm := build/smollm2 build/sums/heldout.parquet build/sums/longer.parquet

# ARM-SEED
seed = $(lastword $(subst -, ,$*))
arm = $(patsubst %-$(seed),%,$*)

# An experiment: its comparison, and its runs.
define experiment
$(1): $(foreach seed,$(or $(SEEDS),$(SEEDS_$(1)),1 2 3 4 5),$(ARMS_$(1):%=$(OUT)/$(1)/%-$(seed).done))
	$(EXGRPO) compare $(OUT)/$(1) --baseline $(or $(2),grpo) --out $(OUT)/$(1).html

$(OUT)/$(1)/%.done: | $(needs_$(1))
	$$(if $$(filter undefined,$$(origin $$(arm))),$$(error $$(arm): no such arm))
	@mkdir -p $(OUT)/$(1)
	$(EXGRPO) run $$(@:.done=) $(recipe_$(1)) --set seed=$$(seed) $$($$(arm)) >$$(@:.done=.log) 2>&1 \
	  || { tail -n 3 $$(@:.done=.log) >&2; exit 1; }
	@touch $$@
endef
$(eval $(call experiment,weak))
$(eval $(call experiment,rare))
$(eval $(call experiment,rarest))
$(eval $(call experiment,ablations,exgrpo))
$(eval $(call experiment,demo))
$(eval $(call experiment,few))
$(eval $(call experiment,few-weak))
$(eval $(call experiment,lm))

build/weak-model:
	$(EXGRPO) demo-model $@ --from weak

build/weak:
	$(EXGRPO) demo-problems $@ --weak

# Chains of four to six operations, of which the weak model solves one in thirty; of five and six,
# one in fifty.
build/weak/long.jsonl: commas := 3
build/weak/longest.jsonl: commas := 4
build/weak/long.jsonl build/weak/longest.jsonl: | build/weak
	grep -E '"answer": "([0-9]+,){$(commas),}' build/weak/train.jsonl >$@

build/demo-model build/smollm2 build/sums/heldout.parquet build/sums/longer.parquet:
	$(MAKE) --no-print-directory $@
