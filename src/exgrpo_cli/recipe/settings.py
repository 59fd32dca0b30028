"""Settings: one typed tree, from TOML, overridden by flags. Strict: an unknown key is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from exgrpo_cli.recipe.rules import RULES, fault

Autocast = Literal["always"] | bool
Beta = Annotated[float, Field(ge=0, lt=1)]

SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]


class Section(BaseModel):
    """A strict part of the recipe."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ModelSettings(Section):
    """The policy and its prompts."""

    path: str = Field("", description="initial policy: a Hugging Face folder or hub name")
    template: Literal["auto", "plain"] = Field(
        "auto",
        description="auto: the tokenizer's chat template if it has one; plain: plain_template",
    )
    plain_template: str = Field(
        "{prompt}",
        pattern=r"\{prompt\}",
        description="prompt of a model without chat template; {prompt} is the question",
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        {},
        description="what the tokenizer's chat template is told besides, such as"
        " {enable_thinking = false} for Qwen3",
    )
    system: str = Field("", description="system message put before each prompt that has none")
    replace_system: bool = Field(
        False, description="system messages that prompts have are left out, and system put instead"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="weights for sampling, and of a frozen LoRA base; auto: bfloat16 on a GPU",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = Field(
        "auto", description="attention implementation in transformers"
    )
    trust_remote_code: bool = Field(False, description="run code that comes with the model")


class ProblemSettings(Section):
    """The training problems."""

    path: str = Field("", description="problems to import into the run, in any known format")
    format: str = Field("auto", description="the file's schema, where detection gets it wrong")
    verifier: str = Field("math", description="verifier of problems that name none")
    limit: int | None = Field(None, ge=1, description="only the first so many problems")
    columns: dict[Literal["question", "answer", "options", "id", "source", "verifier"], str] = (
        Field({}, description="field = column, where detection fails, such as {answer = 'Gold'}")
    )
    skip_bad: bool = Field(False, description="leave out rows that cannot be read, and count them")


class RolloutSettings(Section):
    """Sampling from the current policy."""

    engine: Literal["auto", "vllm", "transformers", "server"] = Field(
        "auto",
        description="auto: vLLM where it is installed, else transformers; server: a running"
        " vllm serve at rollout.url",
    )
    url: str = Field(
        "",
        description="of engine = server, such as http://node7:8000; a key: VLLM_API_KEY",
    )
    samples: int = Field(8, ge=1, description="K, rollouts a question")
    temperature: float = Field(
        1.0, gt=0.0, description="sampling temperature; training rollouts are never greedy"
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are left out, and said")
    max_new_tokens: int = Field(8192, ge=1, description="maximum response length")
    questions_per_part: int = Field(16, ge=1, description="questions in one Parquet part")
    batch_size: int = Field(
        256, ge=1, description="sequences generated together by the transformers engine"
    )
    entropies: bool = Field(
        True, description="keep per-token entropies where the engine has exact ones"
    )
    entropy_top_k: int | None = Field(
        None,
        ge=0,
        le=20,
        description="vLLM: estimate mean entropy from so many most probable tokens; 0: from the"
        " sampled ones; default 8 where score.enabled is false, else 0",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps (transformers engine)")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="vLLM's share of the GPU")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that vLLM splits the model over")
    processes: int = Field(
        1,
        ge=1,
        description="engines of this machine that the loop samples with, each on tensor_parallel"
        " GPUs of its own",
    )


class VerifySettings(Section):
    """Rewards."""

    timeout: float = Field(
        5.0, gt=0, le=86_400, description="hard limit for one answer, seconds; at most a day"
    )
    workers: int | None = Field(None, ge=1, description="worker processes; default: the cores")
    memory_mb: int = Field(2048, ge=256, description="memory a worker may take for an answer, MiB")
    require: Literal["none", "think", "think_answer"] = Field(
        "none",
        description="format without which the reward is 0: a closed thought (as published), or one"
        " and <answer>...</answer>",
    )
    extract: Literal["auto", "boxed", "answer_tag", "hashes", "phrase", "last_line", "whole"] = (
        Field(
            "auto",
            description="where the answer is; auto: a box, else a tag, else hashes or phrase;"
            " whole: math-verify looks for it in all that follows the thought (as published)",
        )
    )
    format: Literal["think", "think_answer"] = Field(
        "think", description="what format_reward is for: a thought, or one and <answer>...</answer>"
    )
    format_reward: float = Field(
        0.0, ge=0, description="added to the reward of a response in this format; 0: off"
    )
    length_penalty: float = Field(
        0.0, ge=0, description="taken from the reward of a truncated response; 0: off"
    )
    length_margin: int = Field(
        0,
        ge=0,
        description="tokens before the limit over which the penalty rises; 0: only truncated ones",
    )


class ScoreSettings(Section):
    """Exact log-probabilities and entropies under the current policy."""

    enabled: bool = Field(True, description="whether the loop runs score")
    tokens_per_batch: int = Field(16384, ge=1, description="tokens of one forward pass")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    processes: int = Field(
        1, ge=1, description="processes (GPUs) of this machine that the loop scores with"
    )


def _rule_text(value: object) -> object:
    """A rule as text, also where ``--set curate.drop=false`` made it a value."""
    return str(value).lower() if isinstance(value, bool | int | float) else value


RuleText = Annotated[str, BeforeValidator(_rule_text)]


class CurateSettings(Section):
    """Which experience is kept, and what the next step learns from. Rules are DuckDB expressions:
    see [ideas.md](ideas.md)."""

    questions: int = Field(128, ge=1, description="B, questions a step")
    replay_ratio: float = Field(
        0.5,
        ge=0.0,
        le=1.0,
        description="rho, share of replay questions; 0: plain GRPO, nothing stored or retired",
    )
    replayed: int = Field(
        1,
        ge=1,
        description="stored trajectories that enter a replay question's group, the first by the"
        " rule choose; fewer where it has fewer",
    )
    replay_samples: int | None = Field(
        None,
        ge=1,
        description="rollouts of a replay question beside them; default K - replayed; fewer save"
        " generation, and let questions retire sooner",
    )
    start_success: float = Field(
        0.35, ge=0.0, le=1.0, description="replay starts once a step's success rate exceeds this"
    )
    store_before_start: bool = Field(
        False, description="keep the successes of steps before replay has started"
    )
    count_replayed: bool = Field(True, description="whether replayed rows count in k and n")
    store: RuleText = Field(
        "correct AND k < n", description="rule, of each rollout: does it enter the pool"
    )
    retire: RuleText = Field(
        "fresh_k = fresh_n", description="rule, of each group: is its question never sampled again"
    )
    bucket: RuleText = Field("k", description="rule, of each stored question: its bucket")
    bucket_weight: RuleText = Field(
        "exp(-0.5 * (bucket - samples / 2.0) ** 2)",
        description="rule, of each bucket: its weight, however many questions it holds",
    )
    question: RuleText = Field(
        "1", description="rule, of each stored question: its weight inside its bucket"
    )
    choose: RuleText = Field(
        "mean_entropy", description="rule, of each stored trajectory: the smallest are replayed"
    )
    drop: RuleText = Field(
        "false", description="rule, of each stored trajectory after a step: does it leave the pool"
    )
    fresh: RuleText = Field(
        "1", description="rule, of each question: its weight among fresh ones inside an epoch"
    )
    revive_after: int | None = Field(
        None, ge=1, description="retired questions come back after so many steps for a check-up"
    )

    @field_validator(*RULES)
    @classmethod
    def _usable(cls, value: str, info: ValidationInfo) -> str:
        default = cls.model_fields[info.field_name or ""].default
        wrong = None if value == default else fault(info.field_name or "", value)
        if wrong:
            raise ValueError(wrong)
        return value


class ObjectiveSettings(Section):
    """The mixed-policy objective."""

    shaping: Literal["ratio", "none", "power", "sqrt", "clip", "uncorrected"] = Field(
        "ratio",
        description="policy shaping f of the replay ratio; ratio: x / (x + beta); clip: PPO's"
        " clipped ratio instead; uncorrected: no ratio, as if sampled now",
    )
    beta: float = Field(0.1, gt=0, description="beta of the shaping")
    power: float = Field(0.5, gt=0, description="exponent of shaping = power")
    clip: Literal["auto", "on", "off"] = Field(
        "auto",
        description="PPO clipping of fresh tokens; auto: on until replay has started, and where"
        " loop.lag let an earlier policy sample",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="ratios are clipped to 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="and to 1 + clip_high")
    dual_clip: float | None = Field(
        None, gt=1, description="fresh ratios of negative advantages count as at most this"
    )
    ratio: Literal["token", "sequence"] = Field(
        "token",
        description="ratio of fresh tokens; sequence: its row's, exp of the mean log-ratio (GSPO;"
        " clip_low and clip_high of 3e-4 and 4e-4 there)",
    )
    divide_by_std: bool = Field(False, description="divide advantages by the group's deviation")
    aggregate: Literal["fixed_length", "token_mean", "sequence_mean"] = Field(
        "fixed_length",
        description="fixed_length: token sum / max length, mean over rows; token_mean: over all"
        " tokens; sequence_mean: mean over rows of each row's token mean",
    )
    length_divisor: int | None = Field(
        None, ge=1, description="divisor of fixed_length; default rollout.max_new_tokens"
    )
    entropy_bonus: float = Field(0.001, ge=0, description="coefficient of the entropy bonus")
    truncated: Literal["keep", "zero_advantage"] = Field(
        "keep",
        description="zero_advantage: truncated fresh responses count in their group's mean, but"
        " their own advantage is 0",
    )
    sampler_cap: float | None = Field(
        None,
        ge=1,
        description="truncated importance correction of fresh tokens for the rollout engine's"
        " rounding: min(pi_trainer / pi_engine, this); 2 is usual; unset: off",
    )
    kl: float = Field(0.0, ge=0, description="coefficient of the k3 KL to a reference policy")
    reference: str = Field("", description="reference policy of the KL; default the initial model")


class TrainSettings(Section):
    """The update."""

    learning_rate: float = Field(
        1e-6, gt=0, description="AdamW's learning rate; where the schedule begins"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate falls over loop.steps"
    )
    min_learning_rate: float = Field(0.0, ge=0, description="what linear and cosine end at")
    warmup_steps: int = Field(0, ge=0, description="optimizer updates of linear warm-up")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW's betas")
    adam_eps: float = Field(
        1e-8, gt=0, description="AdamW's eps; far below the root of its second moment"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped to this norm")
    skip_grad_norm: float | None = Field(
        None, gt=0, description="an update whose gradient norm is above this is skipped"
    )
    minibatch_questions: int = Field(64, ge=1, description="questions an optimizer update")
    tokens_per_microbatch: int = Field(16384, ge=1, description="tokens of one pass on one device")
    gradient_checkpointing: Literal["auto"] | bool = Field(
        "auto", description="recompute activations to save memory; auto: on a GPU"
    )
    processes: int = Field(
        1,
        ge=1,
        description="processes (GPUs) of this machine that the loop trains on; more: torchrun",
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    autocast: Autocast = Field(
        True,
        description="bfloat16 compute on a GPU that has it; always: on a CPU too, which is faster"
        " only where its processor has instructions for it",
    )
    save_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="weights of the saved policy; auto: as the initial model's"
    )
    keep: int | None = Field(
        None, ge=1, description="last optimizer states kept; default: one with each policy"
    )
    keep_policies: int = Field(
        2, ge=1, description="last policies kept, beside each evaluated set's best and keep_every's"
    )
    keep_every: int = Field(
        100, ge=0, description="every policy of so many steps is kept; 0: none, 1: all"
    )


class LoraSettings(Section):
    """Low-rank adapters through peft."""

    enabled: bool = Field(False, description="train an adapter instead of the whole model")
    rank: int = Field(16, ge=1, description="rank")
    alpha: int = Field(32, ge=1, description="scale is alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapter")
    targets: list[str] = Field(["all-linear"], description="module names, or all-linear")


class EvaluateSettings(Section):
    """Held-out problems."""

    problems: dict[SetName, str] = Field({}, description="name = file, evaluated in the loop")
    samples: int = Field(4, ge=1, description="samples a question")
    samples_by_source: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="samples a question of these sources, such as {aime = 32}"
    )
    temperature: float = Field(0.6, ge=0, description="0 is greedy")
    max_new_tokens: int | None = Field(None, ge=1, description="default rollout.max_new_tokens")
    every: int = Field(10, ge=0, description="steps between evaluations in the loop; 0: never")
    bootstrap: int = Field(2000, ge=100, description="resamples of the confidence intervals")


class LoopSettings(Section):
    """`exgrpo run`."""

    steps: int = Field(500, ge=1, description="iterations")
    lag: int = Field(
        0,
        ge=0,
        description="step t is sampled by policy t - lag, so that sampling and training can go on"
        " at the same time: see [lag.md](lag.md)",
    )
    track: Literal["none", "trackio", "wandb", "tensorboard"] = Field(
        "none", description="experiment tracker that gets the metrics, beside metrics.jsonl"
    )


class Recipe(Section):
    """All settings. Which defaults are the paper's, and which are not: docs/training.md."""

    seed: int = Field(0, ge=0, description="every random choice follows from it")
    model: ModelSettings = ModelSettings()
    problems: ProblemSettings = ProblemSettings()
    rollout: RolloutSettings = RolloutSettings()
    verify: VerifySettings = VerifySettings()
    score: ScoreSettings = ScoreSettings()
    curate: CurateSettings = CurateSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    lora: LoraSettings = LoraSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    loop: LoopSettings = LoopSettings()

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        train = self.train
        if train.schedule != "constant" and train.min_learning_rate > train.learning_rate:
            raise ValueError("train.min_learning_rate is above train.learning_rate")
        if self.curate.replayed > 1 and self.replay_samples < 1:
            raise ValueError(
                f"curate.replayed = {self.curate.replayed} leaves no rollouts of rollout.samples ="
                f" {self.rollout.samples} beside them; replay fewer, or set curate.replay_samples"
            )
        if set(self.rollout.url) & set("@?#"):  # here, as a field's own error would print it
            raise ValueError(
                "rollout.url holds more than http://HOST:PORT; it is written into recipe.toml, so"
                " a key belongs into the environment: VLLM_API_KEY"
            )
        return self

    def evaluates(self, step: int) -> bool:
        """Whether the loop evaluates the policy of a step."""
        every = self.evaluate.every
        return every > 0 and (step % every == 0 or step == self.loop.steps)

    @property
    def length_divisor(self) -> int:
        """The fixed length that token sums are divided by."""
        return self.objective.length_divisor or self.rollout.max_new_tokens

    @property
    def replay_samples(self) -> int:
        """Rollouts of a replay question beside its stored trajectories."""
        given = self.curate.replay_samples
        return self.rollout.samples - self.curate.replayed if given is None else given

    @property
    def entropy_top_k(self) -> int:
        """How many tokens the engine's entropies are estimated from; none where score follows."""
        given = self.rollout.entropy_top_k
        return given if given is not None else 0 if self.score.enabled else 8


SAMPLED_BY = (
    "seed", "rollout.temperature", "rollout.max_new_tokens", "rollout.max_prompt_tokens",
    "model.template", "model.chat_template_kwargs", "model.plain_template", "model.system",
    "model.replace_system", "loop.lag",
)  # fmt: skip
"""Settings that a step's rollouts have in common, and that what is made from them counts on."""
