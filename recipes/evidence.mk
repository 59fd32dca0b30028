# The experiments of docs/evidence.md: arms of a few settings, repeated over seeds. Two runs at a time,
# a core each; a run that was stopped goes on, one that is done is not made again.
#   make -f recipes/evidence.mk -j2 weak
#   make -f recipes/evidence.mk -j2 demo SEEDS="1 2 3"

SEEDS ?= 1 2 3 4 5
OUT ?= runs/evidence
EXGRPO ?= .venv/bin/exgrpo
export OMP_NUM_THREADS ?= 1

.PHONY: weak demo
.SECONDARY:

# Whole groups again: the questions of the last steps come back with seven of their rollouts, successes
# and failures, and one fresh one; the ratio is clipped as PPO clips it.
GROUPS := --set curate.questions=24 --set curate.replay_ratio=0.75 --set curate.replayed=7 \
  --set curate.replay_samples=1 --set 'curate.store=k > 0 AND k < n' --set curate.bucket=0 \
  --set curate.choose=age --set 'curate.drop=age > 5' \
  --set 'curate.retire=fresh_k = fresh_n AND fresh_n >= 7' --set objective.shaping=clip

grpo := --set curate.replay_ratio=0
grpo-4 := $(grpo) --set curate.questions=4 --steps 120 --set evaluate.every=40
grpo-16 := $(grpo) --set curate.questions=16
grpo-slow := $(grpo) --set train.learning_rate=1e-4
grpo-fast := $(grpo) --set train.learning_rate=3e-4
exgrpo :=
exgrpo-clip := --set objective.shaping=clip
groups := $(GROUPS)
groups-successes := $(GROUPS) --set 'curate.store=correct AND k < n'
groups-shaped := $(GROUPS) --set objective.shaping=ratio
groups-any-age := $(GROUPS) --set curate.drop=false --set curate.choose=luck

ARMS_weak ?= grpo grpo-4 grpo-16 grpo-slow grpo-fast exgrpo exgrpo-clip groups groups-successes groups-shaped groups-any-age
ARMS_demo ?= grpo exgrpo groups

# ARM-SEED
seed = $(lastword $(subst -, ,$*))
arm = $(patsubst %-$(seed),%,$*)
run = $(EXGRPO) run $(@:.done=) --set seed=$(seed) $(1) $($(arm)) >$(@:.done=.log) 2>&1 \
  || { tail -n 3 $(@:.done=.log) >&2; exit 1; }; touch $@

weak: $(foreach seed,$(SEEDS),$(ARMS_weak:%=$(OUT)/weak/%-$(seed).done))
	$(EXGRPO) compare $(OUT)/weak --baseline grpo --out $(OUT)/weak.html

demo: $(foreach seed,$(SEEDS),$(ARMS_demo:%=$(OUT)/demo/%-$(seed).done))
	$(EXGRPO) compare $(OUT)/demo --baseline grpo --out $(OUT)/demo.html

$(OUT)/weak/%.done: | build/weak-model build/weak $(OUT)/weak
	$(call run,--recipe recipes/weak.toml)

$(OUT)/demo/%.done: | build/demo-model $(OUT)/demo
	$(call run,--recipe recipes/demo.toml --set curate.questions=8 --set train.learning_rate=2e-4 \
	  --set train.minibatch_questions=64 --set evaluate.every=20 --steps 60)

build/weak-model:
	$(EXGRPO) demo-model $@ --from weak

build/weak:
	$(EXGRPO) demo-problems $@ --weak

build/demo-model:
	$(EXGRPO) demo-model $@

$(OUT)/weak $(OUT)/demo:
	mkdir -p $@
