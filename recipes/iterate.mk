# Iterations as files: each stage is a rule, its files are the targets, and make does what is
# missing.
#
#   exgrpo init runs/mine --recipe recipes/demo.toml
#   make -f recipes/iterate.mk RUN=runs/mine STEPS=20
#
# A stage also skips finished work by itself, so a run that was killed goes on with the same line.
# With loop.lag in the recipe a step is sampled as soon as the step before is curated and its policy
# is there, so that make -j2 trains beside it.
#
# How many parts a stage has is known only when it runs, so a file under .made stands for them all;
# it goes when a part is missing.
RUN ?= runs/mine
STEPS ?= 1
EXGRPO ?= exgrpo
ENGINE ?=

# A model that is a folder needs nothing from the Hugging Face hub, which many nodes cannot reach.
MODEL := $(shell sed -n '/^\[model\]/,/^\[/s/^path = "\(.*\)"$$/\1/p' "$(RUN)/recipe.toml" 2>/dev/null)
ifneq ($(and $(MODEL),$(wildcard $(MODEL)/.)),)
export HF_HUB_OFFLINE ?= 1
endif

NUMBERS := $(shell seq 0 $$(( $(STEPS) - 1 )))
LAG := $(or $(shell sed -n '/^\[loop\]/,/^\[./s/^lag *= *//p' "$(RUN)/recipe.toml" 2>/dev/null),0)
step = step-$(shell printf %05d $(1))
minus = $(shell echo $$(( $(1) - $(2) )))
policy = $(if $(filter-out 0 -%,$(1)),$(RUN)/policy/$(call step,$(1)))
curated = $(if $(filter-out -%,$(1)),$(RUN)/curated/$(call step,$(1)).parquet)

# STAGE,FOLDER: remove the marks of steps that have a part missing.
FORGET = for made in "$(RUN)"/.made/*-$(1); do \
  [ -e "$$made" ] || continue; \
  number=$$(basename "$$made" -$(1)); \
  set -- "$(RUN)/$(2)/$$(printf step-%05d "$$number")"/part-*-of-*.parquet; \
  count=$$(echo "$$1" | sed -E 's/.*-of-0*([0-9]+)\.parquet$$/\1/'); \
  [ $$\# = "$$count" ] || rm "$$made"; \
done
$(shell $(call FORGET,rollout,rollouts))
$(shell $(call FORGET,verify,verdicts))
$(shell $(call FORGET,score,scores))

.PHONY: iterate
iterate: $(RUN)/policy/$(call step,$(STEPS))

# Curate and train leave files as they are that later steps were made from; touch says that they are
# up to date all the same. Once every question is retired they make nothing, and nor does it.
define ITERATION
$(RUN)/.made/$(1)-rollout: $(call curated,$(call minus,$(1),1)) $(call policy,$(call minus,$(1),$(LAG)))
	$(EXGRPO) rollout $(RUN) --step $(1) $(if $(ENGINE),--engine $(ENGINE))
	@mkdir -p $$(@D) && touch $$@

$(RUN)/.made/$(1)-verify: $(RUN)/.made/$(1)-rollout
	$(EXGRPO) verify $(RUN) --step $(1)
	@touch $$@

$(RUN)/.made/$(1)-score: $(RUN)/.made/$(1)-rollout
	$(EXGRPO) score $(RUN) --step $(1)
	@touch $$@

$(call curated,$(1)): $(RUN)/.made/$(1)-verify $(RUN)/.made/$(1)-score
	$(EXGRPO) curate $(RUN) --step $(1)
	@touch -c $$@

$(RUN)/policy/$(call step,$(call minus,$(1),-1)): $(call curated,$(1)) $(call policy,$(1))
	$(EXGRPO) train $(RUN) --step $(1)
	@touch -c $$@
endef

$(foreach number,$(NUMBERS),$(eval $(call ITERATION,$(number))))
