"""The typed schema of our own configuration: every key, its type, its range and its meaning.

The local engine and the one on MindSpeed-RL read it; the one on verl has a section of its own in verl's configuration,
made of the same parts.  Keys of MindSpeed-RL itself live under ``mindspeed_rl`` and pass through untouched.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coca_mindspeed.algorithm.methods import method_settings
from coca_mindspeed.config.values import (
    ColumnNames,
    Day,
    FreeForm,
    GraderName,
    KeyFacts,
    Method,
    Pattern,
    TemplateVariables,
    local_only,
)

#: Names of the local engine's devices.
DEVICE_PATTERN = r"^(auto|cpu|(cuda|npu)(:\d{1,3})?)$"
# Facts of the keys below; a key without any is read by every engine, and a resumed run may not change it.
_FREE, _LENGTH, _CLUSTER = KeyFacts("free"), KeyFacts("length"), KeyFacts("cluster")
_LOCAL_ATTENTION = local_only("set mindspeed_rl.megatron_training.use_flash_attn instead")
_RECOMPUTATION = local_only("set mindspeed_rl.megatron_training.recompute_granularity instead", "memory")
_ADAPTERS = local_only("cluster runs have no adapters")
_SFT = local_only("run this stage with the local engine first, and name its result as model.path")
_COLUMNS = local_only("convert the file: coca-mindspeed data prepare records --columns")
_SYNTHETIC = local_only("cluster runs have no synthetic data")
_SAMPLED_AT_ONCE = local_only("set mindspeed_rl.generate_config.max_num_seqs instead", "memory")
_PACKING = local_only("set mindspeed_rl.rl_config.update_max_packing_token_size instead", "memory")
_SHARING = local_only("MindSpeed-RL has no prefix sharing", "memory")
_DEVICE = local_only("set hardware.platform instead")
_THREADS = local_only("set OMP_NUM_THREADS instead")
_PREFLIGHT = local_only("read the samples of the first iteration instead", "free")
_MEGATRONS_ADAMW = local_only("Megatron's AdamW has this value")
#: Facts of the section ``method``, some of whose keys the integrations do not read.
METHOD_FACTS = KeyFacts(
    keys={
        "clip": KeyFacts(
            instead={
                "trl": "the clip is epsilon of GRPOConfig",
                "ms_swift": "the clip is --epsilon",
                "slime": "the clip is --eps-clip",
            }
        ),
        "loss_aggregation": KeyFacts(
            instead={
                "trl": "the aggregation is loss_type of GRPOConfig",
                "ms_swift": "the aggregation is --loss_type",
                "slime": "the aggregation is --custom-pg-loss-reducer-function-path",
            }
        ),
        "entropy_bonus": KeyFacts(
            instead={"ms_swift": "ms-swift passes no log-probs to the functions that make advantages"}
        ),
    }
)
_VALIDATION = local_only("a validation samples a group for each question", "free")
_WHOLE_FILE = local_only("shorten data.evaluate instead", "free")
_EVALUATED_LATER = local_only("convert and evaluate the weights separately (docs/evaluation.md)", "free")
_BEST = local_only("choose an iteration by its validation, and convert its checkpoint", "free")
_LOGGERS = local_only("MindSpeed-RL 2.3.0 logs to TensorBoard and W&B", "free")
_LARGEST_SEED = 2**31 - 1  # the largest that NumPy's and Megatron's generators take on every rank


class Section(BaseModel):
    """A section of the YAML: unknown keys are refused, nothing is coerced ("8" is not 8), and numbers are finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RopeScalingConfig(Section):
    """Llama 3's scaling of the rotary frequencies, with the names and values of ``config.json``."""

    rope_type: Literal["llama3"] = Field(description="llama3 (Llama 3.1 to 3.3)")
    factor: float = Field(ge=1, description="divisor of low frequencies")
    low_freq_factor: float = Field(gt=0, description="longest wavelength kept in part: original length / factor")
    high_freq_factor: float = Field(gt=0, description="longest wavelength kept: original length / factor")
    original_max_position_embeddings: int = Field(ge=1, description="length of pre-training")

    @model_validator(mode="after")
    def _frequencies_in_order(self) -> "RopeScalingConfig":
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"high_freq_factor: must be above low_freq_factor={self.low_freq_factor:g}")
        return self


class ArchitectureConfig(Section):
    """A decoder's shape, from which Megatron builds it; ``coca-mindspeed check`` compares it with ``config.json``."""

    layers: int = Field(ge=1, description="transformer layers")
    hidden: int = Field(ge=1, description="hidden size")
    heads: int = Field(ge=1, description="attention heads")
    kv_groups: int = Field(ge=1, description="key/value heads")
    ffn: int = Field(ge=1, description="size of the gated MLP")
    vocab: int = Field(ge=1, description="rows of the embedding")
    untied_embeddings: bool = Field(description="separate output weights")
    qkv_bias: bool = Field(description="QKV biases")
    qk_layernorm: bool = Field(description="RMSNorm of queries and keys (Qwen3)")
    rope_theta: int = Field(ge=1, description="RoPE base")
    rope_scaling: RopeScalingConfig | None = Field(None, description="RoPE scaling; null: none")
    norm_eps: float = Field(gt=0, description="epsilon of RMSNorm")
    context: int = Field(ge=1, description="longest sequence")


class LoraConfig(Section):
    """LoRA adapters, by peft (the extra ``lora``); docs/training.md."""

    rank: int | None = Field(None, ge=1, description="rank of the adapters; null: full training")
    alpha: float = Field(32.0, gt=0, description="adapters are scaled by alpha / rank")
    targets: Pattern = Field(
        "all-linear",
        min_length=1,
        description="all-linear, or a regular expression of whole module names",
    )
    base_dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the frozen weights")


class ModelConfig(Section):
    """The model."""

    path: str | None = Field(
        None, min_length=1, description="Hugging Face directory, or hub id (local engine); null: tiny model"
    )
    megatron_path: Annotated[str | None, _CLUSTER] = Field(
        None, min_length=1, description="Ascend: Megatron weights for the run's TP and PP"
    )
    architecture: ArchitectureConfig | None = Field(None, description="Ascend: shape of the model")
    compute_dtype: Literal["float32", "bfloat16", "auto"] = Field(
        "float32",
        description="bfloat16: autocast with float32 weights; auto (local engine): if the device has it",
    )
    attention: Annotated[Literal["sdpa", "eager", "flash_attention_2"], _LOCAL_ATTENTION] = Field(
        "sdpa", description="attention implementation"
    )
    trust_remote_code: Annotated[bool, _CLUSTER] = Field(False, description="run the model's own Python code")
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict,
        description="variables of the chat template: {enable_thinking: false}",
    )
    prompt_date: Day = Field(
        None, description="YYYY-MM-DD in the chat template; null: day of the start (refused on Ascend)"
    )
    lora: Annotated[LoraConfig, _ADAPTERS] = LoraConfig()
    gradient_checkpointing: Annotated[bool, _RECOMPUTATION] = Field(False, description="recompute activations")

    @model_validator(mode="after")
    def _flash_attention_computes_in_bfloat16(self) -> "ModelConfig":
        if self.attention == "flash_attention_2" and self.compute_dtype == "float32":
            raise ValueError(
                "attention: flash_attention_2 takes no float32; set compute_dtype to bfloat16 or take sdpa"
            )
        return self


class WarmUpConfig(Section):
    """SFT warm-up on the response format, with high confidences."""

    records: str | None = Field(
        None, min_length=1, description="records (JSON Lines); null: only the tiny model has a warm-up"
    )
    steps: int = Field(700, ge=1, description="updates")
    batch: int = Field(128, ge=1, description="responses in an update")
    lr: float = Field(4e-3, gt=0, le=1, description="peak learning rate, with cosine decay")
    wrong_answers: float = Field(0.1, ge=0, le=1, description="share of answers shown with one digit changed")
    question_weight: float = Field(0.0, ge=0, description="weight of question tokens in the loss")
    overconfident: float = Field(0.85, ge=0, le=1, description="share of confidences near 1, others uniform")


class DataConfig(Section):
    """Questions for training and evaluation."""

    name: Literal["arithmetic", "records"] = Field(
        "arithmetic", description="arithmetic: built-in questions; records: your own"
    )
    train: str | None = Field(
        None,
        min_length=1,
        description="training records; local engine: also other files and hub data sets",
    )
    evaluate: Annotated[str | None, _CLUSTER] = Field(
        None, min_length=1, description="held-out records, as data.train; null: none"
    )
    columns: Annotated[ColumnNames, _COLUMNS] = Field(
        default_factory=dict,
        description="columns by field, {question: q, answer: a} or {messages: m}",
    )
    evaluate_columns: Annotated[ColumnNames, _COLUMNS] = Field(
        default_factory=dict, description="columns of data.evaluate, if its names differ; {}: those of data.columns"
    )
    train_size: Annotated[int, _SYNTHETIC] = Field(50_000, ge=1, description="arithmetic: training questions")
    evaluate_size: Annotated[int, _SYNTHETIC] = Field(2_000, ge=1, description="arithmetic: held-out questions")
    epochs: Annotated[float | None, _LENGTH] = Field(
        None, gt=0, le=1e6, description="passes over the questions in each stage; null: see trainer.steps"
    )
    rows: Annotated[int | None, _CLUSTER] = Field(None, ge=1, description="training records, if the file is elsewhere")
    grader: GraderName = Field("auto", description="grader (docs/grading.md), or one of your own")
    grader_options: FreeForm = Field(default_factory=dict, description="options of the grader")
    require_evaluated: bool = Field(True, description="in training, unevaluated mathematical answers earn no reward")
    seed: Annotated[int, _SYNTHETIC] = Field(0, ge=0, le=_LARGEST_SEED, description="seed of the built-in questions")

    @property
    def columns_of_evaluate(self) -> dict[str, str]:
        return self.evaluate_columns or self.columns

    @property
    def has_held_out(self) -> bool:
        """Whether there are held-out questions; without them, nothing is evaluated."""
        return self.name == "arithmetic" or self.evaluate is not None

    @model_validator(mode="after")
    def _files_for_records(self) -> "DataConfig":
        if self.name == "records" and self.train is None:
            raise ValueError("train: name 'records' needs the path of a JSON Lines file, found null")
        for key in ("train", "evaluate"):
            if self.name == "arithmetic" and getattr(self, key) is not None:
                raise ValueError(
                    f"{key}: would not be read, because name is 'arithmetic', the embedded data; set data.name=records"
                )
        return self


class RolloutConfig(Section):
    """Sampling of responses, without top-k and top-p."""

    prompts: int = Field(128, ge=1, le=1_000_000, description="prompts per step")
    group_size: int = Field(16, ge=2, le=100_000, description="G, responses per prompt")
    # vLLM, which samples on clusters, takes a smaller temperature for 0.01.
    temperature: float = Field(1.0, ge=0.01, le=100, description="divides the logits in sampling and training")
    max_prompt_tokens: int = Field(2048, ge=1, description="a longer prompt is an error")
    max_new_tokens: int = Field(4096, ge=1, description="a longer response is cut off and graded")
    batch_responses: Annotated[int | None, _SAMPLED_AT_ONCE] = Field(
        None, ge=1, description="responses sampled at once; null: all of a step"
    )


class OptimizerConfig(Section):
    """AdamW, its schedule and gradient clipping."""

    name: Annotated[Literal["adamw", "adamw_8bit"], _MEGATRONS_ADAMW] = Field(
        "adamw", description="adamw_8bit: 8-bit moments (the extra adamw-8bit)"
    )
    lr: float = Field(1e-6, gt=0, le=1, description="peak learning rate")
    # YAML has lists only.
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), strict=False, description="AdamW's beta1 and beta2"
    )
    # An eps below 1e-30 is 0 in float32, and 0/0 where a gradient is 0.
    eps: Annotated[float, _MEGATRONS_ADAMW] = Field(1e-8, ge=1e-30, le=1, description="AdamW's eps")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")
    grad_clip: float = Field(1.0, gt=0, description="maximum gradient norm")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="decay to zero after the warm-up; wsd (local engine): over the last fifth",
    )
    warmup_steps: Annotated[int, _CLUSTER] = Field(0, ge=0, description="steps of linear warm-up")

    @model_validator(mode="after")
    def _decay_shrinks(self) -> "OptimizerConfig":
        if self.lr * self.weight_decay >= 1:
            raise ValueError(
                f"weight_decay: a step multiplies the weights by 1 - lr x weight_decay, which {self.lr:g} x "
                f"{self.weight_decay:g} does not leave positive"
            )
        return self


class TrainerConfig(Section):
    """Length of a stage, and how a step updates the policy."""

    steps: Annotated[int, _LENGTH] = Field(300, ge=1, description="steps of each stage of the method")
    minibatches: int = Field(1, ge=1, description="updates per pass; groups stay whole")
    ppo_epochs: int = Field(1, ge=1, description="passes over a step's responses")
    microbatch_prompts: Annotated[int | None, _PACKING] = Field(
        None, ge=1, description="prompts in one backward pass; null: a minibatch"
    )
    microbatch_tokens: Annotated[int | None, _PACKING] = Field(
        None, ge=1, description="tokens in one backward pass, instead of microbatch_prompts"
    )
    share_prompts: Annotated[bool, _SHARING] = Field(True, description="compute each prompt once per group")
    device: Annotated[str, _DEVICE] = Field(
        "auto", pattern=DEVICE_PATTERN, description="auto, cpu, cuda, cuda:N, npu or npu:N"
    )
    threads: Annotated[int | None, _THREADS] = Field(None, ge=1, description="CPU threads; null: PyTorch's default")

    @model_validator(mode="after")
    def _one_kind_of_microbatch(self) -> "TrainerConfig":
        if self.microbatch_tokens is not None and self.microbatch_prompts is not None:
            raise ValueError(
                f"microbatch_tokens: {self.microbatch_tokens} tokens and microbatch_prompts {self.microbatch_prompts} "
                "cannot both say how a minibatch is split; set one of them to null"
            )
        return self


class EvaluationConfig(Section):
    """Evaluation on held-out questions; on Ascend, a group of samples of each."""

    interval: int = Field(0, ge=0, description="steps between evaluations; 0: none while training")
    questions: Annotated[int | None, _WHOLE_FILE] = Field(
        None, ge=1, description="held-out questions while training; null: all"
    )
    final_questions: Annotated[int | None, _EVALUATED_LATER] = Field(
        None, ge=0, description="held-out questions before and after training; 0: none"
    )
    preflight: Annotated[int, _PREFLIGHT] = Field(
        16, ge=0, description="responses sampled first; stop if most are invalid"
    )
    samples: Annotated[int, _VALIDATION] = Field(1, ge=1, description="responses to each held-out question")


class CheckpointConfig(Section):
    """Checkpoints."""

    interval: int = Field(50, ge=0, description="steps between checkpoints; 0: last step only")
    minutes: float | None = Field(
        None, gt=0, description="minutes after which a step saves besides; null: by the interval alone"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints kept")
    best: Annotated[Literal["eval/accuracy", "eval/auroc", "eval/ece", "eval/brier"] | None, _BEST] = Field(
        None, description="keep the best model in OUTPUT/best_model"
    )


class LoggingConfig(Section):
    """Loggers and samples, besides metrics.jsonl."""

    tensorboard: bool = Field(False, description="event files in OUTPUT/tensorboard (Ascend: true, in ./runs)")
    wandb: str | None = Field(None, description="Weights & Biases project")
    swanlab: Annotated[str | None, _LOGGERS] = Field(None, description="SwanLab project")
    samples_interval: int = Field(10, ge=0, description="steps between sample dumps; 0: none")
    samples_prompts: int = Field(4, ge=1, description="prompts per dump, with all responses")


class HardwareConfig(Section):
    """This machine, or a cluster of NPUs."""

    platform: Literal["local", "npu", "host"] = Field("local", description="npu: MindSpeed-RL; host: the same on CPUs")
    nodes: Annotated[int, _CLUSTER] = Field(1, ge=1, description="machines")
    npus_per_node: Annotated[int, _CLUSTER] = Field(1, ge=1, description="NPUs per machine; a 910C counts as two")
    memory_gib: Annotated[float, _CLUSTER] = Field(64.0, gt=0, description="memory of one NPU")
    reserved_gib: Annotated[float, _CLUSTER] = Field(4.0, ge=0, description="GiB of these for CANN and buffers")


class RunConfig(Section):
    """A whole run."""

    seed: int = Field(0, ge=0, le=_LARGEST_SEED, description="random seed")
    model: ModelConfig = ModelConfig()
    warm_up: Annotated[WarmUpConfig, _SFT] = WarmUpConfig()
    method: Annotated[Method, METHOD_FACTS] = Field(method_settings(), description="Training method (docs/method.md).")
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: Annotated[EvaluationConfig, _FREE] = EvaluationConfig()
    checkpoint: Annotated[CheckpointConfig, _FREE] = CheckpointConfig()
    logging: Annotated[LoggingConfig, _FREE] = LoggingConfig()
    hardware: HardwareConfig = HardwareConfig()
    mindspeed_rl: Annotated[FreeForm, _CLUSTER] = Field(
        default_factory=dict, description="keys of MindSpeed-RL, passed unchanged"
    )

    @property
    def total_steps(self) -> int:
        """Steps of all stages of the method."""
        return self.trainer.steps * len(self.method.training_method.stages)

    @model_validator(mode="after")
    def _warm_up_of_a_model(self) -> "RunConfig":
        if self.warm_up.records is not None and self.model.path is None:
            raise ValueError(
                "warm_up.records: is for a model of your own (model.path); the built-in tiny model is warmed up on its "
                "training questions"
            )
        return self

    @model_validator(mode="after")
    def _batch_arithmetic(self) -> "RunConfig":
        if self.rollout.prompts % self.trainer.minibatches:
            divisors = [d for d in range(1, self.rollout.prompts + 1) if self.rollout.prompts % d == 0]
            nearest = min(divisors, key=lambda d: abs(d - self.trainer.minibatches))
            raise ValueError(
                f"trainer.minibatches: {self.trainer.minibatches} does not divide rollout.prompts "
                f"({self.rollout.prompts}); the nearest value that does is {nearest}"
            )
        return self
